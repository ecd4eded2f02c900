// The 4 KiB header in front of a row, as kvtier/tiers/header.py defines it and has it in Python: packed, and held
// to the row that it should be of.
//
// Knows neither files nor Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

constexpr std::size_t HEADER_BYTES = 4096, HEADER_NAME_BYTES = 32, HEADER_TENANT_BYTES = 16;

// What a header binds: the fields of Record and RowFormat.
struct RowClaim {
    const char *name_space, *block_hash;  // HEADER_NAME_BYTES each
    const char* tenant;                   // HEADER_TENANT_BYTES
    const char* sums;
    std::size_t sums_bytes;
    std::uint32_t depth;
    std::int32_t priority;
    std::uint64_t slot, generation, row_bytes, slice_bytes, expiry_s;
    bool pinned;
};

// Whether the sums of all slices are there, and a header has room for them.
bool fits_header(const RowClaim& row);

// Writes HEADER_BYTES; the row fits.
void pack_header(char* page, const RowClaim& row);

// Whether these HEADER_BYTES are a sound header of that row, whatever priority, expiry and pin they name.
bool is_header_of(const char* page, const RowClaim& row);

}  // namespace kvtier
