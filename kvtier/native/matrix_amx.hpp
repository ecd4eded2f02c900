// Attention of up to 16 query rows over some positions of bf16 K and V, on the CPU's matrix unit (AMX).
//
// K is the left side of its product as it lies. V is the right side as it lies or, if it is to serve many rows, the left
// side once it is turned. Included by isa_amx.cpp before attend_bf16.hpp.
#pragma once

#include "row_block.hpp"

namespace kvtier {
namespace {

// Lives on one thread, which owns the unit meanwhile. product() is [dim, lane] if V is turned, else [even or odd dims,
// lane, half of depth].
class MatrixUnit : public RowBlock {
  public:
    MatrixUnit(int lanes, int depth, bool turned, float scale, float* scratch)
        : RowBlock(lanes, depth, turned, scale, scratch) {
        // Registers: 0 sums [16, lanes]; 1 K or V as it lies; 2, 3 right sides [16, lanes]; 4, 5 sums and 6, 7 left sides
        // [even and odd weight of each lane, 64 bytes]. With 16 lanes all are alike.
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) {
            config.rows[i] = std::uint8_t(i < 4 ? BLOCK : smaller(BLOCK, 2 * lanes));
            config.row_bytes[i] = std::uint16_t(i == 0 || i == 2 || i == 3 ? 4 * lanes : 64);
        }
        _tile_loadconfig(&config);
    }
    ~MatrixUnit() { _tile_release(); }
    MatrixUnit(const MatrixUnit&) = delete;
    MatrixUnit& operator=(const MatrixUnit&) = delete;

    // Where a word of two dims of a lane's query lies.
    static int query_place(int lanes, int pair, int lane) { return pair * lanes + lane; }
    // 32 dims of a row from what product() has in its two halves, each number in the lower half of a word.
    static __m512i join_dims(__m512i even, __m512i odd) { return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)); }

    // Unscaled scores of `queries` [pair of dims][lane], in words of two bf16.
    void score(const float* queries, const Places& places, int begin, int end, Ahead& ahead) {
        const long key_bytes = 2L * depth_, lane_bytes = 4L * lanes_;
        for (int dim = 0; dim < depth_; dim += 2 * DEPTH) {
            const bool two = depth_ - dim > DEPTH;
            _tile_loadd(2, queries + dim / 2 * lanes_, lane_bytes);
            if (two) _tile_loadd(3, queries + (dim + DEPTH) / 2 * lanes_, lane_bytes);
            for (int place = begin; place < end; place += BLOCK) {
                const bf16* keys = places.keys[place / BLOCK] + dim;
                float* scores = scores_ + place * lanes_;
                if (dim == 0) _tile_zero(0);
                else _tile_loadd(0, scores, lane_bytes);
                _tile_loadd(1, keys, key_bytes);
                _tile_dpbf16ps(0, 1, 2);
                ahead.fetch();
                if (two) {
                    _tile_loadd(1, keys + DEPTH, key_bytes);
                    _tile_dpbf16ps(0, 1, 3);
                    ahead.fetch();
                }
                _tile_stored(0, scores, lane_bytes);
            }
        }
    }

    // Weights from the scores, with top and total of product().
    void weigh(int begin, int end) { return turned_ ? weigh_scores<true>(begin, end) : weigh_scores<false>(begin, end); }

    // product() = weights times V.
    void multiply(const Places& places, int begin, int end, Ahead& ahead) {
        if (turned_) return multiply_turned(begin, end);
        switch (lanes_) {
            case 1: part_weights<1>(begin, end); break;
            case 2: part_weights<2>(begin, end); break;
            case 4: part_weights<4>(begin, end); break;
            case 8: part_weights<8>(begin, end); break;
            default: part_weights<16>(begin, end);
        }
        const long row_bytes = 2L * depth_;
        for (int dim = 0; dim < depth_; dim += DEPTH) {
            _tile_zero(4);
            _tile_zero(5);
            for (int place = begin; place < end; place += BLOCK) {
                const float* weights = weights_ + 2 * place * lanes_;
                _tile_loadd(1, places.values[place / BLOCK] + dim, row_bytes);
                _tile_loadd(6, weights, 64);
                _tile_dpbf16ps(4, 6, 1);
                if (lanes_ == BLOCK) {
                    _tile_loadd(7, weights + BLOCK * LANES, 64);
                    _tile_dpbf16ps(5, 7, 1);
                }
                ahead.fetch();
            }
            _tile_stored(4, product_ + dim / 2, row_bytes);
            if (lanes_ == BLOCK) _tile_stored(5, product_ + (BLOCK * depth_ + dim) / 2, row_bytes);
        }
    }

  private:
    void multiply_turned(int begin, int end) {
        for (int dim = 0; dim < depth_; dim += 2 * DEPTH) {
            const bool four = depth_ - dim > DEPTH;
            _tile_zero(4);
            _tile_zero(5);
            _tile_zero(6);
            _tile_zero(7);
            for (int place = begin; place < end; place += DEPTH) {
                const float* values = values_ + place / 2 * depth_ + dim * BLOCK;
                _tile_loadd(3, weights_ + place / 2 * BLOCK, 64);
                _tile_loadd(1, values, 64);
                _tile_dpbf16ps(4, 1, 3);
                _tile_loadd(2, values + 256, 64);
                _tile_dpbf16ps(5, 2, 3);
                if (!four) continue;
                _tile_loadd(1, values + 512, 64);
                _tile_dpbf16ps(6, 1, 3);
                _tile_loadd(2, values + 768, 64);
                _tile_dpbf16ps(7, 2, 3);
            }
            float* to = product_ + dim * BLOCK;
            _tile_stored(4, to, 64);
            _tile_stored(5, to + 256, 64);
            if (!four) break;
            _tile_stored(6, to + 512, 64);
            _tile_stored(7, to + 768, 64);
        }
    }

    // In V as it lies two dims share a word. So a weight becomes two words, one for the even and one for the odd dim:
    // [16 tokens][even or odd][lane][token].
    template <int ROWS>
    void part_weights(int begin, int end) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        for (int place = begin; place < end; place += BLOCK) {
            Floats x[ROWS], y[ROWS];
            for (int i = 0; i < ROWS; ++i) x[i] = Simd::load(scores_ + place * ROWS + i * LANES);
            for (int round = 1; round < ROWS; round *= 2) {  // from [token, lane] to [lane, token], a bit of the lane a round
                for (int i = 0; i < ROWS / 2; ++i) {
                    y[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
                    y[ROWS / 2 + i] = _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]);
                }
                for (int i = 0; i < ROWS; ++i) x[i] = y[i];
            }
            float* to = weights_ + 2 * place * ROWS;
            for (int i = 0; i < ROWS; ++i) {
                const __m512i bits = rounded(x[i]);
                _mm512_store_si512(to + i * LANES, _mm512_srli_epi32(bits, 16));
                _mm512_store_si512(to + (ROWS + i) * LANES, _mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))));
            }
        }
    }
};

}  // namespace
}  // namespace kvtier
