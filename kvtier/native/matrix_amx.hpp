// Attention of blocks of 16 rows over one whole span of bf16 K and V, on the CPU's matrix unit (AMX).
//
// Included by isa_amx.cpp after tile.hpp. Products of bf16 are exact in fp32 and sums are fp32; a weight goes in as the
// sum of two bf16 numbers, which keeps 16 bits of it.
#pragma once

namespace kvtier {
namespace {

class MatrixUnit {
  public:
    static constexpr bool PRESENT = true;
    static constexpr int ROWS = 16;  // of queries

    // The unit belongs to this thread while a claim lives: eight registers of 16 rows of 64 bytes.
    struct Claim {
        Claim() {
            struct alignas(64) {
                std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
                std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
            } config;
            _tile_loadconfig(&config);
        }
        ~Claim() { _tile_release(); }
    };

    static constexpr int depth(int dim) { return (dim + 31) / 32 * 32; }

    static long scratch_floats(int dim, int rows) {
        const int depth = MatrixUnit::depth(dim);
        return long(padded(rows)) * depth / 2 + long(depth) / 2 * SPAN + SPAN / 2 * padded(dim) + long(padded(rows)) * SPAN;
    }

    // Takes its memory from `scratch`, 64-byte aligned.
    void place(float* scratch, int dim, int rows) {
        dim_ = dim;
        depth_ = depth(dim);
        width_ = padded(dim);
        q_ = reinterpret_cast<bf16*>(scratch);
        keys_ = scratch + long(padded(rows)) * depth_ / 2;
        values_ = keys_ + long(depth_) / 2 * SPAN;
        weights_ = reinterpret_cast<bf16*>(values_ + SPAN / 2 * width_);
        __builtin_memset(q_, 0, sizeof(bf16) * padded(rows) * depth_);
    }

    void load_query(int row, const bf16* from) { __builtin_memcpy(q_ + long(row) * depth_, from, sizeof(bf16) * dim_); }

    // K as [pair of dim, token] and V as [pair of tokens, dim], in words of two bf16: the right sides of the products.
    void load_span(const bf16* const* keys, const bf16* const* values) {
        for (int token = 0; token < SPAN; token += 16) {
            Simd::transpose_pairs(keys + token, dim_, depth_, keys_ + token, SPAN);
        }
        for (int pair = 0; pair < SPAN / 2; ++pair) {
            for (int i = 0; i < width_; i += 32) {
                const int count = smaller(32, dim_ - i);
                Simd::interleave(values[2 * pair] + i, values[2 * pair + 1] + i, count, values_ + pair * width_ + i,
                                 width_ - i > 16);
            }
        }
    }

    // scores [16, SPAN] of rows row .. row + 15, unscaled.
    void score(int row, float* scores) const {
        const bf16* q = q_ + long(row) * depth_;
        const long q_bytes = sizeof(bf16) * depth_, bytes = sizeof(float) * SPAN;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < depth_; k += 32) {
            const float* keys = keys_ + k / 2 * SPAN;
            _tile_loadd(4, q + k, q_bytes);
            _tile_loadd(5, keys, bytes);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, keys + 16, bytes);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, keys + 32, bytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, keys + 48, bytes);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, scores, bytes);
        _tile_stored(1, scores + 16, bytes);
        _tile_stored(2, scores + 32, bytes);
        _tile_stored(3, scores + 48, bytes);
    }

    // Keeps weights [16, SPAN] of rows row .. row + 15.
    void take_weights(int row, const float* weights) {
        bf16 *high = weights_ + 2L * row * SPAN, *low = high + ROWS * SPAN;
        for (int i = 0; i < ROWS * SPAN; i += 32) {
            const Floats a = Simd::load(weights + i), b = Simd::load(weights + i + 16);
            _mm512_store_si512(high + i, __m512i(_mm512_cvtne2ps_pbh(b, a)));
            const Floats rest_a = Simd::sub(a, Simd::load(high + i)), rest_b = Simd::sub(b, Simd::load(high + i + 16));
            _mm512_store_si512(low + i, __m512i(_mm512_cvtne2ps_pbh(rest_b, rest_a)));
        }
    }

    // acc [16, stride] = weights of rows row .. row + 15 times V.
    void add_values(int row, float* acc, long stride) const {
        const bf16 *high = weights_ + 2L * row * SPAN, *low = high + ROWS * SPAN;
        for (int column = 0; column < width_; column += 32) {
            const bool two = width_ - column > 16;
            _tile_zero(0);
            _tile_zero(1);
            for (int k = 0; k < SPAN; k += 32) {
                const float* values = values_ + k / 2 * width_ + column;
                _tile_loadd(4, high + k, sizeof(bf16) * SPAN);
                _tile_loadd(5, low + k, sizeof(bf16) * SPAN);
                _tile_loadd(6, values, long(sizeof(float)) * width_);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(0, 5, 6);
                if (two) {
                    _tile_loadd(7, values + 16, long(sizeof(float)) * width_);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(1, 5, 7);
                }
            }
            _tile_stored(0, acc + column, long(sizeof(float)) * stride);
            if (two) _tile_stored(1, acc + column + 16, long(sizeof(float)) * stride);
        }
    }

  private:
    int dim_ = 0, depth_ = 0, width_ = 0;
    bf16* q_ = nullptr;  // [row, depth], as it came
    float *keys_ = nullptr, *values_ = nullptr;
    bf16* weights_ = nullptr;  // [block of ROWS, high or low, ROWS, SPAN]
};

}  // namespace
}  // namespace kvtier
