#include "checksum.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#ifdef KVTIER_X86
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

constexpr std::size_t STRIPE = 64, STRIPES = CHECKSUM_STEP / STRIPE;
constexpr std::size_t TOGETHER_MAX = 8;

constexpr std::uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr std::uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                        PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;

// The default secret of XXH3. Stripe n of a block takes 64 bytes from 8 * n on.
alignas(64) constexpr unsigned char SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr std::size_t SCRAMBLE_SECRET = 128, LAST_SECRET = 121, MERGE_SECRET = 11;

alignas(64) constexpr std::uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                                PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

std::uint64_t word(const void* source) {
    std::uint64_t value;
    std::memcpy(&value, source, 8);
    return value;
}

// The last stripe of all takes another part of the secret than its place says.
std::size_t secret_of(std::size_t stripe, bool last) { return last && stripe == STRIPES - 1 ? LAST_SECRET : 8 * stripe; }

using Sums = std::uint64_t[8];

// Takes a block of 1 KiB into the sums of its slice, and asks memory for `next`, the block that comes after it there.
using Absorb = void (*)(Sums& sums, const char* source, char* target, bool last, const char* next);

std::uint64_t merged(const Sums& sums, std::size_t bytes) {
    std::uint64_t total = bytes * PRIME64_1;
    for (int pair = 0; pair < 4; ++pair) {
        const unsigned char* secret = SECRET + MERGE_SECRET + 16 * pair;
        const auto product = static_cast<unsigned __int128>(sums[2 * pair] ^ word(secret)) *
                             (sums[2 * pair + 1] ^ word(secret + 8));
        total += std::uint64_t(product) ^ std::uint64_t(product >> 64);
    }
    total ^= total >> 37;
    total *= 0x165667919E3779F9;
    return total ^ total >> 32;
}

// TOGETHER slices are summed in turn, a block of each.
template <Absorb absorb, std::size_t TOGETHER>
void sum_slices(const char* source, char* target, std::size_t slice_bytes, std::size_t count, char* digests) {
    alignas(STRIPE) Sums sums[TOGETHER];
    for (std::size_t first = 0; first < count; first += TOGETHER) {
        const std::size_t together = std::min(TOGETHER, count - first);
        for (std::size_t slice = 0; slice < together; ++slice) std::memcpy(sums[slice], START, sizeof START);
        for (std::size_t block = 0; block < slice_bytes; block += CHECKSUM_STEP) {
            const bool last = block + CHECKSUM_STEP == slice_bytes;
            for (std::size_t slice = 0; slice < together; ++slice) {
                const std::size_t place = (first + slice) * slice_bytes + block;
                std::size_t next = place + CHECKSUM_STEP + (last ? (TOGETHER - 1) * slice_bytes : 0);
                if (next >= count * slice_bytes) next = place;
                absorb(sums[slice], source + place, target ? target + place : nullptr, last, source + next);
            }
        }
        for (std::size_t slice = 0; slice < together; ++slice, digests += 8) {
            const std::uint64_t sum = merged(sums[slice], slice_bytes);
            for (int byte = 0; byte < 8; ++byte) digests[byte] = char(sum >> (56 - 8 * byte));
        }
    }
#ifdef KVTIER_X86
    if (target) _mm_sfence();
#endif
}

void absorb_plain(Sums& sums, const char* source, char* target, bool last, const char*) {
    if (target) source = static_cast<const char*>(std::memcpy(target, source, CHECKSUM_STEP));
    for (std::size_t stripe = 0; stripe < STRIPES; ++stripe) {
        const unsigned char* secret = SECRET + secret_of(stripe, last);
        for (int lane = 0; lane < 8; ++lane) {
            const std::uint64_t value = word(source + STRIPE * stripe + 8 * lane);
            const std::uint64_t key = value ^ word(secret + 8 * lane);
            sums[lane ^ 1] += value;
            sums[lane] += (key & 0xFFFFFFFF) * (key >> 32);
        }
    }
    if (last) return;
    for (int lane = 0; lane < 8; ++lane) {
        const std::uint64_t sum = sums[lane] ^ sums[lane] >> 47 ^ word(SECRET + SCRAMBLE_SECRET + 8 * lane);
        sums[lane] = sum * PRIME32_1;
    }
}

#ifdef KVTIER_X86

// How a register goes to the target. STREAM goes past the caches, which a row would only fill: half the traffic.
enum class Store { NONE, CACHED, STREAM };

// Whether `next` is asked for ahead. A single run that is only read comes best unasked (docs/LOG.md).
template <Store store, bool in_turn>
constexpr bool AHEAD = in_turn || store != Store::NONE;

template <Store store, bool in_turn>
[[gnu::target("avx2")]] void block_avx2(Sums& sums_, const char* source, char* target, bool last, const char* next) {
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    __m256i sums[2];
    std::memcpy(sums, sums_, sizeof sums);
    for (std::size_t stripe = 0; stripe < STRIPES; ++stripe) {
        const unsigned char* secret = SECRET + secret_of(stripe, last);
        const std::size_t place = STRIPE * stripe;
        if constexpr (AHEAD<store, in_turn>) _mm_prefetch(next + place, _MM_HINT_T0);
        for (int half = 0; half < 2; ++half) {
            const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + place) + half);
            __m256i* stored = reinterpret_cast<__m256i*>(target + place) + half;
            if constexpr (store == Store::CACHED) _mm256_storeu_si256(stored, value);
            if constexpr (store == Store::STREAM) _mm256_stream_si256(stored, value);
            const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + half);
            const __m256i key = _mm256_xor_si256(value, part);
            const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            const __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
            sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
        }
    }
    for (int half = 0; half < 2 && !last; ++half) {
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(SECRET + SCRAMBLE_SECRET) + half);
        const __m256i sum = _mm256_xor_si256(_mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47)), part);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
        sums[half] = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
    }
    std::memcpy(sums_, sums, sizeof sums);
}

template <Store store, bool in_turn>
[[gnu::target("avx512f")]] void block_avx512(Sums& sums_, const char* source, char* target, bool last,
                                             const char* next) {
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    __m512i sums = _mm512_load_si512(sums_);
#pragma GCC unroll 1  // the prefetcher follows a run best if one instruction reads all of it (docs/LOG.md)
    for (std::size_t stripe = 0; stripe < STRIPES; ++stripe) {
        const std::size_t place = STRIPE * stripe;
        if constexpr (AHEAD<store, in_turn>) _mm_prefetch(next + place, _MM_HINT_T0);
        const __m512i value = _mm512_loadu_si512(source + place);
        if constexpr (store == Store::CACHED) _mm512_storeu_si512(target + place, value);
        if constexpr (store == Store::STREAM) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(target + place), value);
        }
        const __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(SECRET + secret_of(stripe, last)));
        const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, _mm512_shuffle_epi32(value, _MM_PERM_BADC)));
    }
    if (!last) {
        const __m512i part = _mm512_loadu_si512(SECRET + SCRAMBLE_SECRET);
        const __m512i sum = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47)), part);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
        sums = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_store_si512(sums_, sums);
}

template <bool in_turn>
void absorb_avx2(Sums& sums, const char* source, char* target, bool last, const char* next) {
    if (!target) return block_avx2<Store::NONE, in_turn>(sums, source, target, last, next);
    if (reinterpret_cast<std::uintptr_t>(target) % STRIPE) {
        return block_avx2<Store::CACHED, in_turn>(sums, source, target, last, next);
    }
    block_avx2<Store::STREAM, in_turn>(sums, source, target, last, next);
}

template <bool in_turn>
void absorb_avx512(Sums& sums, const char* source, char* target, bool last, const char* next) {
    if (!target) return block_avx512<Store::NONE, in_turn>(sums, source, target, last, next);
    if (reinterpret_cast<std::uintptr_t>(target) % STRIPE) {
        return block_avx512<Store::CACHED, in_turn>(sums, source, target, last, next);
    }
    block_avx512<Store::STREAM, in_turn>(sums, source, target, last, next);
}

#endif

Absorb fastest() {
#ifdef KVTIER_X86
    if (__builtin_cpu_supports("avx512f")) return &absorb_avx512<false>;
    if (__builtin_cpu_supports("avx2")) return &absorb_avx2<false>;
#endif
    return &absorb_plain;
}

}  // namespace

std::uint64_t checksum_alone(const char* source, std::size_t bytes) {
    if (bytes == 0 || (bytes - 1) % CHECKSUM_STEP < CHECKSUM_STEP - STRIPE) {
        throw std::invalid_argument("the last block is not nearly whole");
    }
    const Absorb absorb = fastest();
    alignas(STRIPE) Sums sums;
    std::memcpy(sums, START, sizeof START);
    const char* const rest = source + (bytes - 1) / CHECKSUM_STEP * CHECKSUM_STEP;
    for (; source != rest; source += CHECKSUM_STEP) absorb(sums, source, nullptr, false, source);
    // The last stripe of all are the last 64 bytes, whether they lie behind the one before or begin within it.
    const std::size_t left = (bytes - 1) % CHECKSUM_STEP + 1;
    char block[CHECKSUM_STEP];
    std::memcpy(block, rest, CHECKSUM_STEP - STRIPE);
    std::memcpy(block + CHECKSUM_STEP - STRIPE, rest + left - STRIPE, STRIPE);
    absorb(sums, block, nullptr, true, block);
    return merged(sums, bytes);
}

std::vector<std::string> checksum_isas() {
    std::vector<std::string> names;
#ifdef KVTIER_X86
    if (__builtin_cpu_supports("avx512f")) names.emplace_back("avx512");
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
#endif
    names.emplace_back("plain");
    return names;
}

std::size_t checksum_runs() {
#ifdef KVTIER_X86
    if (__builtin_cpu_is("amd")) return 1;
#endif
    return TOGETHER_MAX;
}

Checksum checksum_for(const std::string& isa, std::size_t runs) {
    if (runs == 0) runs = checksum_runs();
    if (runs != 1 && runs != TOGETHER_MAX) throw std::invalid_argument("slices are summed in 1 or 8 runs");
    const auto chosen = [runs](Checksum in_order, Checksum in_turn) { return runs == 1 ? in_order : in_turn; };
    for (const std::string& name : checksum_isas()) {
        if (isa != "auto" && isa != name) continue;
#ifdef KVTIER_X86
        if (name == "avx512") {
            return chosen(&sum_slices<absorb_avx512<false>, 1>, &sum_slices<absorb_avx512<true>, TOGETHER_MAX>);
        }
        if (name == "avx2") {
            return chosen(&sum_slices<absorb_avx2<false>, 1>, &sum_slices<absorb_avx2<true>, TOGETHER_MAX>);
        }
#endif
        return chosen(&sum_slices<absorb_plain, 1>, &sum_slices<absorb_plain, TOGETHER_MAX>);
    }
    throw std::invalid_argument("no checksums for isa \"" + isa + "\" on this CPU");
}

}  // namespace kvtier
