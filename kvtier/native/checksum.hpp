// XXH3, 64 bits and no seed, of slices that lie one behind the other, which can be copied in the same pass: memory is
// read once.
//
// For lengths in steps of 1 KiB, which all slices of a row have, but for one function. Knows neither rows nor Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier {

constexpr std::size_t CHECKSUM_STEP = 1024;

constexpr std::size_t CHECKSUM_BYTES = 8;

// Writes the sums of `count` slices at `source` to `sums`, most significant byte first. The slices are copied to
// `target` unless that is null. Both may lie in memory that others write to: the sums are those of what is at `target`.
using Checksum = void (*)(const char* source, char* target, std::size_t slice_bytes, std::size_t count, char* sums);

// How many slices it pays to sum in turn here: 1 where the prefetcher follows one run past the pages (AMD's), 8 where
// it stops at each page of 4 KiB, so that a core reads several runs at once faster than one (docs/LOG.md).
std::size_t checksum_runs();

// "auto" is the best that this CPU can run; std::invalid_argument for one that it cannot. `runs` 1 or 8, 0 for
// checksum_runs().
Checksum checksum_for(const std::string& isa, std::size_t runs = 0);

// XXH3, 64 bits and no seed, of bytes whose last block of 1 KiB lacks less than 64: of a header, for one.
std::uint64_t checksum_alone(const char* source, std::size_t bytes);

// What this CPU and this build can run, best first.
std::vector<std::string> checksum_isas();

}  // namespace kvtier
