// The part of kvtier._native that has an io_uring: Ring, which takes the requests and makes the results of
// kvtier/io/base.py. Used by kvtier/io/uring.py.
//
// Nothing here blocks or gives up the GIL: a daemon thread that wants it back while Python ends would not survive that.
#include "uring_module.hpp"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "checksum.hpp"
#include "uring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {
namespace {

// Address and length of a buffer that its owner keeps; a view of it is not held.
iovec span_of(nb::handle buffer, bool written_to) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, written_to ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw nb::python_error();
    const iovec span{view.buf, std::size_t(view.len)};
    PyBuffer_Release(&view);
    return span;
}

// The fields of IoRequest.
enum Field : Py_ssize_t { OPERATION, DESCRIPTOR, OFFSET, BUFFERS, TAG, PREPARE, THEN, SUMS, FIELDS };
constexpr Py_ssize_t RESULT_FIELDS = 6;

nb::handle field(nb::handle request, Field which) { return PyTuple_GET_ITEM(request.ptr(), which); }

// A ring whose moves own a reference to their request: whoever is in the kernel keeps its buffers, whatever comes.
class RequestRing {
  public:
    // `operations` read, write and sync; `result` makes the results, a tuple with the fields of IoResult.
    RequestRing(int depth, std::size_t slice_bytes, nb::tuple operations, nb::type_object result,
                std::size_t piece_bytes)
        : slice_bytes_(slice_bytes), operations_(std::move(operations)), result_(std::move(result)),
          ring_(depth, piece_bytes) {
        if (operations_.size() != 3 || slice_bytes % CHECKSUM_STEP) {
            throw std::invalid_argument("three operations, and slices in steps of 1 KiB");
        }
        if (!PyType_IsSubtype(type(), &PyTuple_Type)) throw nb::type_error("results are tuples");
    }

    ~RequestRing() {
        cancel();
        for (const End& end : ring_.take()) nb::steal(static_cast<PyObject*>(end.owner));
    }

    void push(nb::list requests) {
        std::vector<Move> moves;
        moves.reserve(requests.size());
        for (nb::handle request : requests) moves.push_back(move_of(request));
        ring_.push(std::move(moves));
        for (nb::handle request : requests) request.inc_ref();
    }

    nb::list cancel() {
        nb::list tags;
        for (const Move& move : ring_.cancel()) {
            tags.append(move.tag);
            nb::steal(static_cast<PyObject*>(move.owner));
        }
        return tags;
    }

    nb::tuple take() {
        nb::list results, others;
        for (const End& end : ring_.take()) {
            const nb::object request = nb::steal(static_cast<PyObject*>(end.owner));
            if (!end.sums.empty()) {
                field(request, SUMS).attr(taken_) = nb::bytes(end.sums.data(), end.sums.size());
            }
            if (end.whole && field(request, THEN).is_none()) {
                results.append(result_of(end));
            } else {
                others.append(nb::make_tuple(request, end.result, end.whole, end.started_ns, end.ended_ns));
            }
        }
        return nb::make_tuple(results, others);
    }

    // Keeps the memory mapped for as long as requests may come: no later mapping shall be taken for it.
    void register_memory(nb::object memory) {
        const iovec span = span_of(memory, true);
        if (span.iov_len == 0) return;
        memories_.push_back(std::move(memory));
        ring_.register_memory(span);
    }

    bool close() {
        const bool left = ring_.close();
        if (left) memories_.clear();
        return left;
    }

    Ring& ring() { return ring_; }

  private:
    PyTypeObject* type() const { return reinterpret_cast<PyTypeObject*>(result_.ptr()); }

    Move move_of(nb::handle request) const {
        if (!PyTuple_Check(request.ptr()) || PyTuple_GET_SIZE(request.ptr()) != FIELDS) {
            throw nb::type_error("a request has the fields of IoRequest");
        }
        Move move{};
        move.owner = request.ptr();
        move.tag = nb::cast<std::uint64_t>(field(request, TAG));
        move.operation = operation_of(field(request, OPERATION));
        move.descriptor = nb::cast<int>(field(request, DESCRIPTOR));
        if (move.operation == Operation::sync) return move;
        move.offset = nb::cast<std::uint64_t>(field(request, OFFSET));
        const bool reads = move.operation == Operation::read;
        for (nb::handle buffer : field(request, BUFFERS)) move.parts.push_back(span_of(buffer, reads));
        if (!reads || slice_bytes_ == 0 || field(request, SUMS).is_none()) return move;
        move.slice_bytes = slice_bytes_;
        if (move.parts.empty() || move.parts.back().iov_len % slice_bytes_) {
            throw std::invalid_argument("sums are wanted of a last buffer that is not whole slices");
        }
        return move;
    }

    Operation operation_of(nb::handle operation) const {
        for (int code = 0; code < 3; ++code) {
            if (operation.is(operations_[code])) return Operation(code);
        }
        throw std::invalid_argument("neither read nor write nor sync");
    }

    nb::object result_of(const End& end) const {
        nb::object fields[RESULT_FIELDS] = {
            nb::int_(end.tag), nb::int_(end.result), nb::none(), nb::none(), nb::int_(end.ended_ns - end.started_ns),
            nb::int_(end.ended_ns),
        };
        nb::object result = nb::steal(type()->tp_alloc(type(), RESULT_FIELDS));
        if (!result.is_valid()) throw nb::python_error();
        for (Py_ssize_t place = 0; place < RESULT_FIELDS; ++place) {
            PyTuple_SET_ITEM(result.ptr(), place, fields[place].release().ptr());
        }
        return result;
    }

    const std::size_t slice_bytes_;
    const nb::tuple operations_;
    const nb::type_object result_;
    std::vector<nb::object> memories_;
    const nb::object taken_ = nb::steal(PyUnicode_InternFromString("taken"));
    Ring ring_;
};

}  // namespace

void add_uring(nb::module_& module) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    nb::class_<RequestRing>(module, "Ring", "An io_uring and its thread, at most `depth` requests in the kernel.")
        .def(nb::init<int, std::size_t, nb::tuple, nb::type_object, std::size_t>(), "depth"_a, "slice_bytes"_a,
             "operations"_a, "result"_a, "piece_bytes"_a = PIECE_BYTES)
        .def("push", &RequestRing::push, "requests"_a)
        .def("cancel", &RequestRing::cancel)
        .def("take", &RequestRing::take)
        .def_prop_ro("bell", [](RequestRing& self) { return self.ring().bell(); })
        .def("wake", [](RequestRing& self) { self.ring().wake(); })
        .def("register_memory", &RequestRing::register_memory, "memory"_a)
        .def("refusal", [](RequestRing& self) { return self.ring().refusal(); })
        .def_prop_ro("registered_moves", [](RequestRing& self) { return self.ring().registered_moves(); })
        .def("close", &RequestRing::close)
        .def("after_fork_in_child", [](RequestRing& self) { self.ring().after_fork_in_child(); });
}

}  // namespace kvtier
