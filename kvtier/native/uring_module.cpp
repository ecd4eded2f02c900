// The part of kvtier._native that has an io_uring: Ring, whose moves and ends are tuples. Used by kvtier/io/uring.py.
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
#include <nanobind/stl/vector.h>

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

void push(Ring& ring, const std::vector<nb::tuple>& moves) {
    std::vector<Move> made;
    made.reserve(moves.size());
    for (const nb::tuple& move : moves) {
        const int code = nb::cast<int>(move[1]);
        if (code < 0 || code > 2) throw std::invalid_argument("an operation is 0 (read), 1 (write) or 2 (sync)");
        Move& one = made.emplace_back();
        one.tag = nb::cast<std::uint64_t>(move[0]);
        one.operation = Operation(code);
        one.descriptor = nb::cast<int>(move[2]);
        one.offset = nb::cast<std::uint64_t>(move[3]);
        for (nb::handle buffer : move[4]) one.parts.push_back(span_of(buffer, one.operation == Operation::read));
        one.slice_bytes = nb::cast<std::size_t>(move[5]);
        if (one.slice_bytes == 0) continue;
        if (one.parts.empty() || one.slice_bytes % CHECKSUM_STEP || one.parts.back().iov_len % one.slice_bytes) {
            throw std::invalid_argument("a last buffer that is not whole slices, in steps of 1 KiB");
        }
    }
    ring.push(std::move(made));
}

nb::list take(Ring& ring) {
    nb::list list;
    for (const End& end : ring.take()) {
        const nb::bytes sums(end.sums.data(), end.sums.size());
        list.append(nb::make_tuple(end.tag, end.result, end.started_ns, end.ended_ns, sums));
    }
    return list;
}

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
    nb::class_<Ring>(module, "Ring", "An io_uring and its thread, at most `depth` moves in the kernel. See uring.hpp.")
        .def(nb::init<int>(), "depth"_a)
        .def("push", &push, "moves"_a)
        .def("cancel", &Ring::cancel)
        .def("take", &take)
        .def_prop_ro("bell", &Ring::bell)
        .def("wake", &Ring::wake)
        .def_prop_ro("moving", &Ring::moving)
        .def("close", &Ring::close)
        .def("after_fork_in_child", &Ring::after_fork_in_child);
}

}  // namespace kvtier
