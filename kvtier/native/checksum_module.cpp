// The part of kvtier._native that checksums and copies rows, over Python's buffers.
//
// Takes many rows a call, since to get the GIL back may take longer than to copy one. Knows no header and no record.
#include "checksum_module.hpp"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "checksum.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {
namespace {

// Bytes of a Python object, which stay where they are until this goes.
class Buffer {
  public:
    Buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags)) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* data() const { return static_cast<char*>(view_.buf); }
    std::size_t bytes() const { return std::size_t(view_.len); }

  private:
    Py_buffer view_;
};

using Buffers = std::vector<std::unique_ptr<Buffer>>;

Buffers buffers_of(nb::list objects, int flags) {
    Buffers found;
    for (nb::handle object : objects) found.push_back(std::make_unique<Buffer>(object, flags));
    return found;
}

// One list entry a row: the sums of its slices, 8 bytes each, most significant first.
nb::list run(const Buffers& sources, const Buffers* targets, std::size_t slice_bytes, const std::string& isa,
             std::size_t runs) {
    const Checksum checksum = checksum_for(isa, runs);
    if (slice_bytes == 0 || slice_bytes % CHECKSUM_STEP) throw std::invalid_argument("slices come in steps of 1 KiB");
    if (targets && targets->size() != sources.size()) throw std::invalid_argument("not as many targets as sources");
    std::vector<std::string> rows;
    for (std::size_t row = 0; row < sources.size(); ++row) {
        const std::size_t bytes = sources[row]->bytes();
        if (bytes % slice_bytes) throw std::invalid_argument("a row that is not whole slices");
        if (targets && (*targets)[row]->bytes() != bytes) throw std::invalid_argument("a target of another length");
        rows.emplace_back(bytes / slice_bytes * CHECKSUM_BYTES, '\0');
    }
    {
        nb::gil_scoped_release released;
        for (std::size_t row = 0; row < rows.size(); ++row) {
            char* target = targets ? (*targets)[row]->data() : nullptr;
            checksum(sources[row]->data(), target, slice_bytes, rows[row].size() / CHECKSUM_BYTES, rows[row].data());
        }
    }
    nb::list sums;
    for (const std::string& row : rows) sums.append(nb::bytes(row.data(), row.size()));
    return sums;
}

nb::list checksum_rows(nb::list rows, std::size_t slice_bytes, const std::string& isa, std::size_t runs) {
    return run(buffers_of(rows, PyBUF_SIMPLE), nullptr, slice_bytes, isa, runs);
}

nb::list copy_rows(nb::list sources, nb::list targets, std::size_t slice_bytes, const std::string& isa,
                   std::size_t runs) {
    const Buffers targets_ = buffers_of(targets, PyBUF_WRITABLE);
    return run(buffers_of(sources, PyBUF_SIMPLE), &targets_, slice_bytes, isa, runs);
}

}  // namespace

void add_checksums(nb::module_& module) {
    module.def("checksum_isas", &checksum_isas, "What checksums can run on, best first.");
    module.def("checksum_rows", &checksum_rows, "rows"_a, "slice_bytes"_a, "isa"_a = "auto", "runs"_a = 0,
               "For each row the xxh3_64 sums of its slices. The GIL is released.");
    module.def("copy_rows", &copy_rows, "sources"_a, "targets"_a, "slice_bytes"_a, "isa"_a = "auto", "runs"_a = 0,
               "Copy rows; for each the xxh3_64 sums of the slices at its target. The GIL is released.");
}

}  // namespace kvtier
