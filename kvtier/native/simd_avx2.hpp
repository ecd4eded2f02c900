// Eight floats in one AVX2 register. Included by isa_avx2.cpp alone, hence the unnamed namespace.
#pragma once

#include <immintrin.h>

#include "kernels.hpp"
#include "watched.hpp"

namespace kvtier {
namespace {

struct Simd {
    static constexpr int LANES = 8;
    static constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;  // 12 sums, 2 operands and 1 broadcast in 16 registers
    using Floats = __m256;

    static Floats set(float x) { return _mm256_set1_ps(x); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b if either is NaN
    static Floats round(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scale_by_power(Floats a, Floats n) {  // a * 2^n in two steps, so that n may reach -150
        const __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1);
        return mul(mul(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(power, half)));
    }
    static float first(Floats a) { return _mm256_cvtss_f32(a); }

    static float sum(Floats a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float largest(Floats a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static Floats load(const float* from, int count) {
        reads(from, count);
        return _mm256_maskload_ps(from, mask(count));
    }
    static void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
    static void store(float* to, Floats x, int count) {
        writes(to, count);
        _mm256_maskstore_ps(to, mask(count), x);
    }
    template <class T>
    static Floats load(const T* from) {
        return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), T{});
    }
    template <class T>
    static Floats load(const T* from, int count) {
        T row[LANES] = {};
        for (int i = 0; i < count; ++i) row[i] = from[i];
        return load(row);
    }
    template <class T>
    static void store(T* to, Floats x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(x, T{}));
    }
    template <class T>
    static void store(T* to, Floats x, int count) {
        T row[LANES];
        store(row, x);
        for (int i = 0; i < count; ++i) to[i] = row[i];
    }

    // to[column * stride + row] = from[row][column] for 8 rows and `columns` columns, as fp32.
    template <class T>
    static void transpose(const T* const* from, int columns, float* to, int stride) {
        for (int column = 0; column < columns; column += LANES) {
            const int count = columns - column < LANES ? columns - column : LANES;
            Floats x[8];
            for (int i = 0; i < 8; ++i) x[i] = count == LANES ? load(from[i] + column) : load(from[i] + column, count);
            transpose_block(x);
            for (int i = 0; i < count; ++i) store(to + (column + i) * stride, x[i]);
        }
    }

  private:
    static __m256i mask(int count) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static Floats power_of_two(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static Floats widen(__m128i x, bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
    static Floats widen(__m128i x, f16) { return _mm256_cvtph_ps(x); }
    static __m128i narrow(Floats x, f16) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static __m128i narrow(Floats x, bf16) {  // to nearest even; NaN stays NaN
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    static void transpose_block(Floats (&x)[8]) {
        Floats y[8];
        for (int i = 0; i < 8; i += 4) {  // 4x4 within each 128-bit lane
            const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1]));
            const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1]));
            const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3]));
            const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
            y[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
            y[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
            y[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
            y[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
        }
        for (int i = 0; i < 4; ++i) {
            x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
            x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
        }
    }
};

}  // namespace
}  // namespace kvtier
