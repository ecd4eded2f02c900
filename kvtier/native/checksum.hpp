// XXH3, 64 bits and no seed, of slices that lie one behind the other, which can be copied in the same pass: memory is
// read once.
//
// For lengths in steps of 1 KiB only, which all slices of a row have. Knows neither rows nor Python.
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

// "auto" is the best that this CPU can run; std::invalid_argument for one that it cannot.
Checksum checksum_for(const std::string& isa);

// What this CPU and this build can run, best first.
std::vector<std::string> checksum_isas();

}  // namespace kvtier
