// Sixteen floats in one AVX-512 register. Included by isa_avx512.cpp alone, hence the unnamed namespace.
#pragma once

#include <immintrin.h>

#include "kernels.hpp"
#include "watched.hpp"

namespace kvtier {
namespace {

struct Simd {
    static constexpr int LANES = 16;
    static constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;  // 24 sums, 4 operands and 1 broadcast in 32 registers
    using Floats = __m512;

    static Floats set(float x) { return _mm512_set1_ps(x); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if either is NaN
    static Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scale_by_power(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
    static float first(Floats a) { return _mm512_cvtss_f32(a); }

    static float sum(Floats a) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float largest(Floats a) { return _mm512_reduce_max_ps(a); }

    static __mmask16 mask(int count) { return __mmask16((1u << count) - 1); }
    static Floats widen(__m256i x, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    static Floats widen(__m256i x, f16) { return _mm512_cvtph_ps(x); }
    static __m256i narrow(Floats x, f16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static __m256i narrow(Floats x, bf16) {  // to nearest even; NaN stays NaN
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i result = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
    }

    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static Floats load(const float* from, int count) {
        reads(from, count);
        return _mm512_maskz_loadu_ps(mask(count), from);
    }
    static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
    static void store(float* to, Floats x, int count) {
        writes(to, count);
        _mm512_mask_storeu_ps(to, mask(count), x);
    }
    template <class T>
    static Floats load(const T* from) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), T{});
    }
    template <class T>
    static Floats load(const T* from, int count) {
        reads(from, count);
        return widen(_mm256_maskz_loadu_epi16(mask(count), from), T{});
    }
    template <class T>
    static void store(T* to, Floats x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x, T{}));
    }
    template <class T>
    static void store(T* to, Floats x, int count) {
        writes(to, count);
        _mm256_mask_storeu_epi16(to, mask(count), narrow(x, T{}));
    }

    // to[column * stride + row] = from[row][column] for 16 rows and `columns` columns, as fp32.
    static void transpose(const float* const* from, int columns, float* to, int stride) {
        for (int column = 0; column < columns; column += 16) {
            const int count = columns - column < 16 ? columns - column : 16;
            __m512i x[16];
            for (int i = 0; i < 16; ++i) x[i] = load_words(from[i] + column, count);
            transpose_words(x);
            for (int i = 0; i < count; ++i) _mm512_store_si512(to + (column + i) * stride, x[i]);
        }
    }
    template <class T>  // a pair of columns is one word; `columns` is even
    static void transpose(const T* const* from, int columns, float* to, int stride) {
        for (int column = 0; column < columns; column += 32) {
            const int pairs = (columns - column < 32 ? columns - column : 32) / 2;
            __m512i x[16];
            for (int i = 0; i < 16; ++i) x[i] = load_words(from[i] + column, pairs);
            transpose_words(x);
            for (int i = 0; i < pairs; ++i) store_pair(to + (column + 2 * i) * stride, stride, x[i], T{});
        }
    }

    // to[pair * stride + row] = the word of from[row][2 pair, 2 pair + 1] for 16 rows, zeros from `columns` up to `depth`.
    static void transpose_pairs(const bf16* const* from, int columns, int depth, float* to, int stride) {
        for (int column = 0; column < depth; column += 32) {
            const int pairs = (columns - column < 32 ? columns - column : 32) / 2;
            __m512i x[16];
            for (int i = 0; i < 16; ++i) x[i] = load_words(from[i] + column, pairs);
            transpose_words(x);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (column / 2 + i) * stride, x[i]);
        }
    }
    // to[dim][pair] = the word of low[pair][first + dim], high[pair][first + dim], for 16 pairs and 32 dims.
    static void turn_pairs(const bf16* const* low, const bf16* const* high, int first, float* to) {
        __m512i x[16], y[16];
        for (int i = 0; i < 16; ++i) {
            const __m512i a = _mm512_loadu_si512(low[i] + first), b = _mm512_loadu_si512(high[i] + first);
            x[i] = _mm512_unpacklo_epi16(a, b);  // dims 0 to 3 of each 8
            y[i] = _mm512_unpackhi_epi16(a, b);
        }
        transpose_words(x);
        transpose_words(y);
        for (int i = 0; i < 16; ++i) {
            float* row = to + (i / 4 * 8 + i % 4) * 16;
            _mm512_store_si512(row, x[i]);
            _mm512_store_si512(row + 4 * 16, y[i]);
        }
    }

  private:
    static __m512i load_words(const void* from, int count) {
        reads(static_cast<const char*>(from), 4L * count);
        return _mm512_maskz_loadu_epi32(mask(count), from);
    }
    static void store_pair(float* to, int stride, __m512i pairs, bf16) {
        _mm512_store_si512(to, _mm512_slli_epi32(pairs, 16));
        _mm512_store_si512(to + stride, _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
    }
    static void store_pair(float* to, int stride, __m512i pairs, f16) {
        _mm512_store_ps(to, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
        _mm512_store_ps(to + stride, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))));
    }
    static void transpose_words(__m512i (&x)[16]) {
        __m512i y[16];
        for (int i = 0; i < 16; i += 4) {  // 4x4 words within each 128-bit lane
            const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
            const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
            y[i] = _mm512_unpacklo_epi64(a, c);
            y[i + 1] = _mm512_unpackhi_epi64(a, c);
            y[i + 2] = _mm512_unpacklo_epi64(b, d);
            y[i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        for (int i = 0; i < 4; ++i) {  // 4x4 lanes: y[i + 4 g] has columns i, 4 + i, 8 + i, 12 + i of rows 4 g .. 4 g + 3
            const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
            const __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
            const __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
            x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
            x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
            x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
            x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
        }
    }
};

}  // namespace
}  // namespace kvtier
