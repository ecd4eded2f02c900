// kvtier._native: CPU kernels over raw addresses. With the *_module.cpp, the only file that knows Python.
//
// Callers (kvtier/attention/native.py, kvtier/models/ops.py and native_layers.py) own every tensor behind an address and
// vouch for its shape.
// All strides are in elements. Types are 0 fp32, 1 bf16, 2 fp16. Every call releases the GIL; one call at a time for
// each Kernels object.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "checksum_module.hpp"
#include "kernel_set.hpp"
#include "layers.hpp"
#include "uring_module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {
namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// A set of kernels that takes addresses.
class Kernels : public KernelSet {
  public:
    using KernelSet::KernelSet;

    void append(Rows rows, Address k, Address v, std::int64_t k_token_stride, std::int64_t k_head_stride,
                std::int64_t v_token_stride, std::int64_t v_head_stride, Address append_rows, Address append_offsets,
                int tokens) {
        KernelSet::append({rows, at<void>(k), at<void>(v), k_token_stride, k_head_stride, v_token_stride, v_head_stride,
                           at<std::int64_t>(append_rows), at<std::int32_t>(append_offsets), tokens});
    }

    void attend(Rows rows, Type q_type, Address q, std::int64_t q_token_stride, std::int64_t q_head_stride, Address out,
                Address lse, Address tables, std::int64_t table_stride, Address query_starts, Address lengths,
                int sequences, int heads, float scale, int window) {
        const AttendArguments arguments{rows, q_type, at<void>(q), q_token_stride, q_head_stride, at<void>(out),
                                        at<float>(lse), at<std::int64_t>(tables), table_stride,
                                        at<std::int32_t>(query_starts), at<std::int32_t>(lengths), sequences, heads,
                                        scale, window};
        Plan cut = plan(arguments);
        KernelSet::attend(arguments, cut);
    }

    void rmsnorm(Type x_type, Address x, std::int64_t outer, std::int64_t inner, std::int64_t outer_stride,
                 std::int64_t inner_stride, Type out_type, Address weight, Address out, std::int64_t dim, float eps) {
        norm({x_type, x_type, out_type, at<void>(x), nullptr, at<void>(weight), at<void>(out), outer, inner,
              outer_stride, inner_stride, dim, eps});
    }

    void add_rmsnorm(Type residual_type, Address residual, Type update_type, Address update, Address weight, Address out,
                     std::int64_t tokens, std::int64_t dim, float eps) {
        norm({residual_type, update_type, update_type, at<void>(residual), at<void>(update), at<void>(weight),
              at<void>(out), tokens, 1, dim, 0, dim, eps});
    }

    void rope(Type type, Address x, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
              std::int64_t token_stride, std::int64_t head_stride, Address cos, Address sin) {
        KernelSet::rope({type, at<void>(x), tokens, heads, dim, token_stride, head_stride, at<float>(cos),
                         at<float>(sin)});
    }

    void silu_mul(Type type, Address gate_up, std::int64_t token_stride, Address out, std::int64_t tokens,
                  std::int64_t inter) {
        KernelSet::silu_mul({type, at<void>(gate_up), at<void>(out), tokens, inter, token_stride});
    }

    void widen(Type type, Address x, Address out, std::int64_t rows, std::int64_t dim) {
        KernelSet::widen({type, at<void>(x), at<float>(out), rows, dim});
    }

    void linear(Address x, std::int64_t x_stride, Address weight, Address bias, Address out, std::int64_t tokens,
                std::int64_t in_dim, std::int64_t out_dim) {
        multiply({at<float>(x), at<float>(weight), at<float>(bias), at<float>(out), tokens, in_dim, out_dim, x_stride});
    }

    void linear_few(Address x, std::int64_t x_stride, Address weight, Address out, std::int64_t rows, std::int64_t in_dim,
                    std::int64_t out_dim) {
        multiply_few({at<bf16>(x), at<bf16>(weight), at<bf16>(out), rows, in_dim, out_dim, x_stride});
    }

    std::uint64_t read(Address memory, std::size_t bytes) { return KernelSet::read(at<std::uint64_t>(memory), bytes); }
};

using MatrixAddresses = std::pair<Address, Address>;  // weight, bias

Matrix matrix_at(const MatrixAddresses& addresses) { return {at<void>(addresses.first), at<void>(addresses.second)}; }

void make_weights(LayerWeights* self, MatrixAddresses qkv, MatrixAddresses output, MatrixAddresses gate_up,
                  MatrixAddresses down, Address q_norm, Address k_norm, Address post_norm, Address next_norm, int window) {
    new (self) LayerWeights{matrix_at(qkv), matrix_at(output), matrix_at(gate_up), matrix_at(down), at<void>(q_norm),
                            at<void>(k_norm), at<void>(post_norm), at<void>(next_norm), window};
}

void make_layers(Layers* self, Kernels& kernels, Rows rows, std::int64_t slice_bytes, int heads, std::int64_t hidden,
                 std::int64_t intermediate, float eps, float scale, std::vector<LayerWeights> layers) {
    new (self) Layers(kernels, {rows, slice_bytes, heads, hidden, intermediate, eps, scale}, std::move(layers));
}

void run_layers(Layers& layers, int first, int end, int tokens, int sequences, Address residual, Address normed,
                Address cos, Address sin, Address tables, std::int64_t table_stride, Address query_starts,
                Address lengths, Address append_rows, Address append_offsets) {
    layers.run({tokens, sequences, at<void>(residual), at<void>(normed), at<float>(cos), at<float>(sin),
                at<std::int64_t>(tables), table_stride, at<std::int32_t>(query_starts), at<std::int32_t>(lengths),
                at<std::int64_t>(append_rows), at<std::int32_t>(append_offsets)},
               first, end);
}

}  // namespace
}  // namespace kvtier

NB_MODULE(_native, module) {
    using namespace kvtier;
    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();

    nb::set_leak_warnings(false);  // a ring with I/O stuck in the kernel is left behind on purpose

    module.def("supported_isas", &supported_isas, "What this CPU and this build can run, best first.");
    add_checksums(module);
    add_uring(module);

    nb::enum_<Type>(module, "Type").value("float32", Type::f32).value("bfloat16", Type::bf16).value("float16", Type::f16);

    nb::class_<Rows>(module, "Rows", "Geometry of one layer's slice of a row.")
        .def("__init__",
             [](Rows* self, Type type, int kv_heads, int dim, int block_tokens, std::int64_t layer_bytes,
                std::int64_t value_bytes, std::int64_t head_bytes) {
                 if (dim < 8 || dim > 1024 || dim % 8) throw std::invalid_argument("dim must be 8 to 1024 in steps of 8");
                 if (kv_heads < 1 || block_tokens < 1) throw std::invalid_argument("kv_heads and block_tokens must be > 0");
                 new (self) Rows{type, kv_heads, dim, block_tokens, layer_bytes, value_bytes, head_bytes};
             },
             "type"_a, "kv_heads"_a, "dim"_a, "block_tokens"_a, "layer_bytes"_a, "value_bytes"_a, "head_bytes"_a);

    nb::class_<Kernels>(module, "Kernels", "Kernels of one ISA and their threads. Not usable after fork().")
        .def(nb::init<int, const std::string&>(), "threads"_a, "isa"_a = "auto")
        .def_prop_ro("isa", &Kernels::isa)
        .def_prop_ro("threads", &Kernels::threads)
        .def_prop_ro("few_rows_max", &Kernels::few_rows_max, "Rows that linear_few takes; 0: it cannot be used here.")
        .def("append", &Kernels::append, no_gil, "rows"_a, "k"_a, "v"_a, "k_token_stride"_a, "k_head_stride"_a,
             "v_token_stride"_a, "v_head_stride"_a, "append_rows"_a, "append_offsets"_a, "tokens"_a)
        .def("attend", &Kernels::attend, no_gil, "rows"_a, "q_type"_a, "q"_a, "q_token_stride"_a, "q_head_stride"_a,
             "out"_a, "lse"_a, "tables"_a, "table_stride"_a, "query_starts"_a, "lengths"_a, "sequences"_a, "heads"_a,
             "scale"_a, "window"_a)
        .def("rmsnorm", &Kernels::rmsnorm, no_gil, "x_type"_a, "x"_a, "outer"_a, "inner"_a, "outer_stride"_a,
             "inner_stride"_a, "out_type"_a, "weight"_a, "out"_a, "dim"_a, "eps"_a)
        .def("add_rmsnorm", &Kernels::add_rmsnorm, no_gil, "residual_type"_a, "residual"_a, "update_type"_a, "update"_a,
             "weight"_a, "out"_a, "tokens"_a, "dim"_a, "eps"_a)
        .def("rope", &Kernels::rope, no_gil, "type"_a, "x"_a, "tokens"_a, "heads"_a, "dim"_a, "token_stride"_a,
             "head_stride"_a, "cos"_a, "sin"_a)
        .def("silu_mul", &Kernels::silu_mul, no_gil, "type"_a, "gate_up"_a, "token_stride"_a, "out"_a, "tokens"_a,
             "inter"_a)
        .def("widen", &Kernels::widen, no_gil, "type"_a, "x"_a, "out"_a, "rows"_a, "dim"_a)
        .def("linear", &Kernels::linear, no_gil, "x"_a, "x_stride"_a, "weight"_a, "bias"_a, "out"_a, "tokens"_a,
             "in_dim"_a, "out_dim"_a)
        .def("linear_few", &Kernels::linear_few, no_gil, "x"_a, "x_stride"_a, "weight"_a, "out"_a, "rows"_a, "in_dim"_a,
             "out_dim"_a)
        .def("read", &Kernels::read, no_gil, "memory"_a, "bytes"_a, "Read so many bytes; the sum of their 64-bit words.");

    nb::class_<LayerWeights>(module, "LayerWeights", "Addresses of one layer's weights.")
        .def("__init__", &make_weights, "qkv"_a, "output"_a, "gate_up"_a, "down"_a, "q_norm"_a, "k_norm"_a,
             "post_norm"_a, "next_norm"_a, "window"_a);

    nb::class_<Layers>(module, "Layers", "The layers of a decoder on a set of kernels.")
        .def("__init__", &make_layers, nb::keep_alive<1, 2>(), "kernels"_a, "rows"_a, "slice_bytes"_a, "heads"_a,
             "hidden"_a, "intermediate"_a, "eps"_a, "scale"_a, "layers"_a)
        .def_prop_ro("rows_max", &Layers::rows_max, "Tokens of the largest pass that run() takes; 0: none.")
        .def("run", &run_layers, no_gil, "first"_a, "end"_a, "tokens"_a, "sequences"_a, "residual"_a, "normed"_a,
             "cos"_a, "sin"_a, "tables"_a, "table_stride"_a, "query_starts"_a, "lengths"_a, "append_rows"_a,
             "append_offsets"_a);
}
