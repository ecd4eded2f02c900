#include "layers.hpp"

#include <cstdlib>
#include <map>
#include <new>
#include <stdexcept>
#include <utility>

namespace kvtier {
namespace {

constexpr int FLOAT_ROWS = 64;  // of fp32: in passes of more what is saved between the kernels is next to nothing

int rows_max_of(const KernelSet& kernels, const LayerShape& shape) {
    const std::int64_t dim = shape.rows.dim, q = shape.heads * dim, qkv = q + 2 * shape.rows.kv_heads * dim;
    const bool fits = KernelSet::takes_few(shape.hidden, qkv) && KernelSet::takes_few(q, shape.hidden) &&
                      KernelSet::takes_few(shape.hidden, 2 * shape.intermediate) &&
                      KernelSet::takes_few(shape.intermediate, shape.hidden);
    switch (shape.rows.type) {
        case Type::f32: return FLOAT_ROWS;
        case Type::bf16: return fits ? kernels.few_rows_max() : 0;
        case Type::f16: break;
    }
    return 0;
}

const LayerShape& checked(const LayerShape& shape) {
    if (shape.heads < 1 || shape.heads % shape.rows.kv_heads) {
        throw std::invalid_argument("heads must be a multiple of kv_heads");
    }
    if (shape.hidden < 1 || shape.intermediate < 1) throw std::invalid_argument("hidden and intermediate must be > 0");
    return shape;
}

}  // namespace

void Layers::Free::operator()(char* memory) const { std::free(memory); }

// For row_elements items of each row.
Layers::Buffer Layers::buffer(std::int64_t row_elements, std::size_t item_bytes) const {
    const std::size_t bytes = rows_max_ * std::size_t(row_elements) * item_bytes;
    if (bytes == 0) return nullptr;
    Buffer memory(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    if (!memory) throw std::bad_alloc();
    return memory;
}

Layers::Layers(KernelSet& kernels, const LayerShape& shape, std::vector<LayerWeights> layers)
    : kernels_(kernels), shape_(checked(shape)), layers_(std::move(layers)),
      item_bytes_(shape.rows.type == Type::f32 ? 4 : 2), rows_max_(rows_max_of(kernels, shape)) {
    const std::int64_t dim = shape.rows.dim, q = shape.heads * dim, kv = shape.rows.kv_heads * dim;
    qkv_ = buffer(q + 2 * kv, item_bytes_);
    q_ = buffer(q, item_bytes_);
    k_ = buffer(kv, item_bytes_);
    attended_ = buffer(q, item_bytes_);
    lse_ = buffer(shape.heads, sizeof(float));
    update_ = buffer(shape.hidden, item_bytes_);
    gate_up_ = buffer(2 * shape.intermediate, item_bytes_);
    gated_ = buffer(shape.intermediate, item_bytes_);
    for (const LayerWeights& layer : layers_) {
        if (layer.window < 0) throw std::invalid_argument("a window must not be negative");
        if (!layer.q_norm != !layer.k_norm) throw std::invalid_argument("q and k have both a norm or neither");
    }
}

void Layers::run(const Pass& pass, int first, int end) {
    if (first < 0 || first > end || end > int(layers_.size())) throw std::invalid_argument("no such layers");
    if (pass.tokens < 1 || pass.tokens > rows_max_) throw std::invalid_argument("a pass has 1 to rows_max tokens");
    if (pass.sequences < 1 || pass.query_starts[0] != 0 || pass.query_starts[pass.sequences] != pass.tokens) {
        throw std::invalid_argument("the tokens of the sequences are not those of the pass");
    }
    AttendArguments attention = attention_of(pass);
    std::map<int, Plan> plans;  // by window: the same for all layers that have it
    for (int index = first; index < end; ++index) {
        const LayerWeights& layer = layers_[index];
        attention.window = layer.window;
        attention.rows.layer_bytes = shape_.rows.layer_bytes + index * shape_.slice_bytes;
        auto plan = plans.find(layer.window);
        if (plan == plans.end()) plan = plans.emplace(layer.window, kernels_.plan(attention)).first;
        run_layer(pass, layer, attention, plan->second);
    }
}

void Layers::run_layer(const Pass& pass, const LayerWeights& layer, AttendArguments& attention, Plan& plan) {
    const int tokens = pass.tokens, kv_heads = shape_.rows.kv_heads;
    const std::int64_t dim = shape_.rows.dim, q_width = shape_.heads * dim, width = q_width + 2 * kv_heads * dim;
    multiply(pass.normed, shape_.hidden, layer.qkv, qkv_.get(), width, tokens);
    Heads q{qkv_.get(), shape_.heads, width};
    Heads k{qkv_.get() + item_bytes_ * q_width, kv_heads, width};
    const Heads v{k.data + item_bytes_ * kv_heads * dim, kv_heads, width};
    if (layer.q_norm) {
        q = norm_heads(q, layer.q_norm, q_.get(), tokens);
        k = norm_heads(k, layer.k_norm, k_.get(), tokens);
    }
    rotate(q, pass);
    rotate(k, pass);
    kernels_.append({attention.rows, k.data, v.data, k.token_stride, dim, v.token_stride, dim, pass.append_rows,
                     pass.append_offsets, tokens});
    attention.q = q.data;
    attention.q_token_stride = q.token_stride;
    kernels_.attend(attention, plan);
    multiply(attended_.get(), q_width, layer.output, update_.get(), shape_.hidden, tokens);
    add_norm(pass, layer.post_norm);
    multiply(pass.normed, shape_.hidden, layer.gate_up, gate_up_.get(), 2 * shape_.intermediate, tokens);
    kernels_.silu_mul({shape_.rows.type, gate_up_.get(), gated_.get(), tokens, shape_.intermediate,
                       2 * shape_.intermediate});
    multiply(gated_.get(), shape_.intermediate, layer.down, update_.get(), shape_.hidden, tokens);
    add_norm(pass, layer.next_norm);
}

// All but q, its stride, the layer and its window.
AttendArguments Layers::attention_of(const Pass& pass) const {
    AttendArguments attention{};
    attention.rows = shape_.rows;
    attention.q_type = shape_.rows.type;
    attention.q_head_stride = shape_.rows.dim;
    attention.out = attended_.get();
    attention.lse = reinterpret_cast<float*>(lse_.get());
    attention.tables = pass.tables;
    attention.table_stride = pass.table_stride;
    attention.query_starts = pass.query_starts;
    attention.lengths = pass.lengths;
    attention.sequences = pass.sequences;
    attention.heads = shape_.heads;
    attention.scale = shape_.scale;
    return attention;
}

// out [token, out_dim] = x [token, in_dim] through the matrix.
void Layers::multiply(const void* x, std::int64_t in_dim, const Matrix& matrix, void* out, std::int64_t out_dim,
                      int tokens) {
    if (shape_.rows.type == Type::f32) {
        kernels_.multiply({static_cast<const float*>(x), static_cast<const float*>(matrix.weight),
                           static_cast<const float*>(matrix.bias), static_cast<float*>(out), tokens, in_dim, out_dim,
                           in_dim});
        return;
    }
    kernels_.multiply_few({static_cast<const bf16*>(x), static_cast<const bf16*>(matrix.weight), static_cast<bf16*>(out),
                           tokens, in_dim, out_dim, in_dim});
    if (matrix.bias) kernels_.add_bias({shape_.rows.type, out, matrix.bias, tokens, out_dim});
}

// Each head through the norm, into `out`.
Layers::Heads Layers::norm_heads(const Heads& heads, const void* weight, void* out, int tokens) {
    const std::int64_t dim = shape_.rows.dim;
    const Type type = shape_.rows.type;
    kernels_.norm({type, type, type, heads.data, nullptr, weight, out, tokens, heads.count, heads.token_stride, dim, dim,
                   shape_.eps});
    return {static_cast<char*>(out), heads.count, heads.count * dim};
}

void Layers::rotate(const Heads& heads, const Pass& pass) {
    const std::int64_t dim = shape_.rows.dim;
    kernels_.rope({shape_.rows.type, heads.data, pass.tokens, heads.count, dim, heads.token_stride, dim, pass.cos,
                   pass.sin});
}

// Adds the update to the residual; `normed` is that through the norm.
void Layers::add_norm(const Pass& pass, const void* weight) {
    const Type type = shape_.rows.type;
    kernels_.norm({type, type, type, pass.residual, update_.get(), weight, pass.normed, pass.tokens, 1, shape_.hidden, 0,
                   shape_.hidden, shape_.eps});
}

}  // namespace kvtier
