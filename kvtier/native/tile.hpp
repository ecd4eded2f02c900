// Arithmetic shared by the kernels: exp, and products of a few rows with a few vectors of columns held in registers.
//
// Included by isa_*.cpp after one simd_*.hpp, whose `Simd` it uses. Each element of a product is one chain of fma over k
// in ascending order, so its bits do not depend on the tile it is computed in.
#pragma once

namespace kvtier {
namespace {

using Floats = Simd::Floats;
constexpr int LANES = Simd::LANES;
constexpr int TILE_ROWS = Simd::TILE_ROWS;

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// e^x for x <= 88, to about 1e-7: 2^n e^r with |r| <= ln 2 / 2, e^r by the polynomial through its values at the zeros of
// the 7th Chebyshev polynomial (2e-8). exp(-inf) = 0, NaN stays NaN.
inline Floats exp(Floats x) {
    x = Simd::max(Simd::set(-104.0f), x);
    const Floats n = Simd::round(Simd::mul(x, Simd::set(1.44269504f)));
    // ln 2 in two parts, the first with few enough bits for n times it to be exact
    const Floats r = Simd::fma(n, Simd::set(2.12194440e-4f), Simd::fma(n, Simd::set(-355.0f / 512), x));
    constexpr float FACTORS[] = {0.00837516829f, 0.0416663523f, 0.16666415f, 0.500000005f, 1.00000004f, 1.0f};
    Floats sum = Simd::set(0.00139411608f);
    for (int i = 0; i < 6; ++i) sum = Simd::fma(sum, r, Simd::set(FACTORS[i]));
    return Simd::scale_by_power(sum, n);
}

// c[row][column] += sum over k in [begin, end) of a[row][k] * b(k)[column], for ROWS rows and VECTORS * LANES columns.
template <int ROWS, int VECTORS, class B>
inline void multiply_tile(const float* a, long a_stride, const B& b, int begin, int end, float* c, long c_stride) {
    Floats sums[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row) {
        for (int i = 0; i < VECTORS; ++i) sums[row][i] = Simd::load(c + row * c_stride + i * LANES);
    }
    for (int k = begin; k < end; ++k) {
        const auto* from = b(k);
        Floats operand[VECTORS];
        for (int i = 0; i < VECTORS; ++i) operand[i] = Simd::load(from + i * LANES);
        for (int row = 0; row < ROWS; ++row) {
            const Floats factor = Simd::set(a[row * a_stride + k]);
            for (int i = 0; i < VECTORS; ++i) sums[row][i] = Simd::fma(factor, operand[i], sums[row][i]);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int i = 0; i < VECTORS; ++i) Simd::store(c + row * c_stride + i * LANES, sums[row][i]);
    }
}

// The same for any number of columns that is a multiple of LANES; `b(k, column)` is the address of b's element.
template <int ROWS, class B>
inline void multiply_rows(const float* a, long a_stride, const B& b, int begin, int end, float* c, long c_stride,
                          int columns) {
    constexpr int VECTORS = Simd::TILE_VECTORS;
    int column = 0;
    const auto from = [&](int k) { return b(k, column); };
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES) {
        multiply_tile<ROWS, VECTORS>(a, a_stride, from, begin, end, c + column, c_stride);
    }
    for (; column < columns; column += LANES) {
        multiply_tile<ROWS, 1>(a, a_stride, from, begin, end, c + column, c_stride);
    }
}

// The same for 1 to TILE_ROWS rows.
template <class B, int ROWS = TILE_ROWS>
inline void multiply(int rows, const float* a, long a_stride, const B& b, int begin, int end, float* c, long c_stride,
                     int columns) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply<B, ROWS - 1>(rows, a, a_stride, b, begin, end, c, c_stride, columns);
    }
    multiply_rows<ROWS>(a, a_stride, b, begin, end, c, c_stride, columns);
}

}  // namespace
}  // namespace kvtier
