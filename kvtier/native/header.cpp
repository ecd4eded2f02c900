#include "header.hpp"

#include <cstring>

#include "checksum.hpp"

namespace kvtier {
namespace {

// Little-endian, like all machines that this is built for. The sums of the slices follow, then zeros, then its own sum.
struct [[gnu::packed]] Fixed {
    char magic[8];
    std::uint32_t version, slice_count;
    char name_space[HEADER_NAME_BYTES], block_hash[HEADER_NAME_BYTES], tenant[HEADER_TENANT_BYTES];
    std::uint32_t depth;
    std::int32_t priority;
    std::uint64_t slot, generation, row_bytes, slice_bytes, expiry_s;
    std::uint8_t pinned;
    char zeros[7];
};

constexpr char MAGIC[] = "kvtirow\n";
constexpr std::uint32_t VERSION = 2;
constexpr std::size_t SELF_SUM = HEADER_BYTES - CHECKSUM_BYTES, COMPARED = offsetof(Fixed, zeros);
constexpr std::uint64_t GENERATION_END = std::uint64_t(1) << 62, EXPIRY_END_S = std::uint64_t(1) << 40;
constexpr std::int32_t PRIORITY_MAX = 100;
static_assert(sizeof(Fixed) == 152);

Fixed fixed_of(const RowClaim& row) {
    Fixed fixed{};
    std::memcpy(fixed.magic, MAGIC, sizeof fixed.magic);
    fixed.version = VERSION;
    fixed.slice_count = std::uint32_t(row.row_bytes / row.slice_bytes);
    std::memcpy(fixed.name_space, row.name_space, sizeof fixed.name_space);
    std::memcpy(fixed.block_hash, row.block_hash, sizeof fixed.block_hash);
    std::memcpy(fixed.tenant, row.tenant, sizeof fixed.tenant);
    fixed.depth = row.depth;
    fixed.priority = row.priority;
    fixed.slot = row.slot;
    fixed.generation = row.generation;
    fixed.row_bytes = row.row_bytes;
    fixed.slice_bytes = row.slice_bytes;
    fixed.expiry_s = row.expiry_s;
    fixed.pinned = row.pinned;
    return fixed;
}

}  // namespace

bool fits_header(const RowClaim& row) {
    return row.slice_bytes != 0 && row.row_bytes / row.slice_bytes * CHECKSUM_BYTES == row.sums_bytes &&
           row.sums_bytes <= SELF_SUM - sizeof(Fixed);
}

void pack_header(char* page, const RowClaim& row) {
    const Fixed fixed = fixed_of(row);
    std::memcpy(page, &fixed, sizeof fixed);
    std::memcpy(page + sizeof fixed, row.sums, row.sums_bytes);
    std::memset(page + sizeof fixed + row.sums_bytes, 0, SELF_SUM - sizeof fixed - row.sums_bytes);
    const std::uint64_t sum = checksum_alone(page, SELF_SUM);
    std::memcpy(page + SELF_SUM, &sum, sizeof sum);
}

bool is_header_of(const char* page, const RowClaim& row) {
    if (!fits_header(row)) return false;
    Fixed found;
    std::memcpy(&found, page, sizeof found);
    Fixed wanted = fixed_of(row);
    wanted.priority = found.priority;
    wanted.expiry_s = found.expiry_s;
    wanted.pinned = found.pinned;
    std::uint64_t sum;
    std::memcpy(&sum, page + SELF_SUM, sizeof sum);
    return std::memcmp(&found, &wanted, COMPARED) == 0 &&
           std::memcmp(page + sizeof found, row.sums, row.sums_bytes) == 0 && found.generation < GENERATION_END &&
           found.priority >= -PRIORITY_MAX && found.priority <= PRIORITY_MAX && found.expiry_s < EXPIRY_END_S &&
           found.pinned <= 1 && sum == checksum_alone(page, SELF_SUM);
}

}  // namespace kvtier
