// The part of kvtier._native that checksums and copies rows, and packs and judges their headers, over Python's buffers.
//
// Takes many rows a call, since to get the GIL back may take longer than to copy one; for a header nobody gives it up.
#include "checksum_module.hpp"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "checksum.hpp"
#include "header.hpp"

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

// The fields of Record.
enum Field : Py_ssize_t { BLOCK_HASH, SLOT, GENERATION, DEPTH, SUMS, PRIORITY, EXPIRY_S, TENANT, PINNED, FIELDS };

// Bytes of an object, if it has as many as `bytes` or that is 0; else null.
const char* bytes_of(nb::handle object, std::size_t bytes) {
    if (!PyBytes_Check(object.ptr()) || (bytes && std::size_t(PyBytes_GET_SIZE(object.ptr())) != bytes)) return nullptr;
    return PyBytes_AS_STRING(object.ptr());
}

// Whether a header can be of that row at all; what `row` points to is the arguments' own.
bool claim_of(nb::handle record, nb::handle name_space, RowClaim& row) {
    if (!PyTuple_Check(record.ptr()) || PyTuple_GET_SIZE(record.ptr()) != FIELDS) {
        throw nb::type_error("a record has the fields of Record");
    }
    const auto field = [record](Field which) { return nb::handle(PyTuple_GET_ITEM(record.ptr(), which)); };
    row.name_space = bytes_of(name_space, HEADER_NAME_BYTES);
    row.block_hash = bytes_of(field(BLOCK_HASH), HEADER_NAME_BYTES);
    row.tenant = bytes_of(field(TENANT), HEADER_TENANT_BYTES);
    row.sums = bytes_of(field(SUMS), 0);
    if (!row.name_space || !row.block_hash || !row.tenant || !row.sums) return false;
    row.sums_bytes = std::size_t(PyBytes_GET_SIZE(field(SUMS).ptr()));
    row.pinned = PyObject_IsTrue(field(PINNED).ptr()) == 1;
    return nb::try_cast(field(SLOT), row.slot) && nb::try_cast(field(GENERATION), row.generation) &&
           nb::try_cast(field(DEPTH), row.depth) && nb::try_cast(field(PRIORITY), row.priority) &&
           nb::try_cast(field(EXPIRY_S), row.expiry_s) && fits_header(row);
}

void pack_header_(nb::handle page, nb::handle record, nb::handle name_space, std::uint64_t row_bytes,
                  std::uint64_t slice_bytes) {
    RowClaim row{};
    row.row_bytes = row_bytes, row.slice_bytes = slice_bytes;
    const Buffer target(page, PyBUF_WRITABLE);
    if (target.bytes() != HEADER_BYTES || !claim_of(record, name_space, row)) {
        throw std::invalid_argument("no header has room for that");
    }
    pack_header(target.data(), row);
}

bool is_header_of_(nb::handle page, nb::handle record, nb::handle name_space, std::uint64_t row_bytes,
                   std::uint64_t slice_bytes) {
    RowClaim row{};
    row.row_bytes = row_bytes, row.slice_bytes = slice_bytes;
    const Buffer source(page, PyBUF_SIMPLE);
    return source.bytes() == HEADER_BYTES && claim_of(record, name_space, row) && is_header_of(source.data(), row);
}

}  // namespace

void add_checksums(nb::module_& module) {
    module.def("checksum_isas", &checksum_isas, "What checksums can run on, best first.");
    module.def("checksum_rows", &checksum_rows, "rows"_a, "slice_bytes"_a, "isa"_a = "auto", "runs"_a = 0,
               "For each row the xxh3_64 sums of its slices. The GIL is released.");
    module.def("copy_rows", &copy_rows, "sources"_a, "targets"_a, "slice_bytes"_a, "isa"_a = "auto", "runs"_a = 0,
               "Copy rows; for each the xxh3_64 sums of the slices at its target. The GIL is released.");
    module.def("pack_header", &pack_header_, "page"_a, "record"_a, "namespace"_a, "row_bytes"_a, "slice_bytes"_a,
               "Write the header of a row.");
    module.def("is_header_of", &is_header_of_, "page"_a, "record"_a, "namespace"_a, "row_bytes"_a, "slice_bytes"_a,
               "Whether a page is a sound header of a row, whatever priority, expiry and pin it names.");
}

}  // namespace kvtier
