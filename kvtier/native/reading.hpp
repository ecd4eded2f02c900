// Reads memory as fast as this machine can: the limit of every kernel that reads much and computes little.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

class Pool;

// Reads `bytes` from an address that is a multiple of 8, with all threads of the pool, and returns the sum of the whole
// 64-bit words, so that no read can be left out.
std::uint64_t read_memory(Pool& pool, const std::uint64_t* memory, std::size_t bytes);

}  // namespace kvtier
