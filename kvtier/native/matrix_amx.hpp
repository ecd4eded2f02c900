// Attention of up to 16 query rows over some positions of bf16 K and V, on the CPU's matrix unit (AMX).
//
// Scores are [token, lane], a lane being a row: K is the left side of its product as it lies, maxima and sums run along
// lanes. V is the right side as it lies or, if it is to serve many rows, the left side once it is turned. Products of
// bf16 are exact in fp32, sums are fp32, weights are rounded to bf16. Included by attend_amx.hpp; knows no tables.
#pragma once

#include "ahead.hpp"

namespace kvtier {
namespace {

constexpr int BLOCK = 16;      // rows of a register of the unit: of tokens, of dims or of queries
constexpr int DEPTH = 32;      // bf16 numbers in such a row
constexpr int PLACES = 2 * SPAN;  // positions in a call at most

// 2^x for x < 128, to about 1e-7: 2^floor(x) times the polynomial of least relative error for the rest. 0 for -inf.
inline Floats power_of_two(Floats x) {
    const Floats rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    constexpr float FACTORS[] = {0.00898934f, 0.05582632f, 0.24015361f, 0.69315308f, 0.99999994f};
    Floats sum = Simd::set(0.00187758f);
    for (float factor : FACTORS) sum = Simd::fma(sum, rest, Simd::set(factor));
    return Simd::scale_by_power(sum, x);
}

// Where K and V of each BLOCK places lie, as [BLOCK, depth].
struct Places {
    const bf16* keys[PLACES / BLOCK];
    const bf16* values[PLACES / BLOCK];
};

// Lives on one thread, which owns the unit meanwhile. `begin` and `end` are multiples of DEPTH.
class MatrixUnit {
  public:
    static long scratch_floats(int depth) {
        return BLOCK * (depth + 2) + 3 * PLACES * BLOCK + PLACES * depth / 2;
    }

    // `lanes`: 1, 2, 4, 8 or 16 rows. `depth`: dims padded to a multiple of DEPTH. `turned`: needs 16 lanes.
    MatrixUnit(int lanes, int depth, bool turned, float scale, float* scratch)
        : lanes_(lanes), depth_(depth), turned_(turned), scale_(scale), product_(scratch),
          scores_(product_ + BLOCK * (depth + 2)), weights_(scores_ + PLACES * BLOCK),
          values_(weights_ + 2 * PLACES * BLOCK) {
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

    // [dim, lane] if V is turned, else [even or odd dims, lane, half of depth]; then for each of LANES lanes the largest
    // score and the sum of the weights, those of a row in every lane that is its number modulo the lanes.
    float* product() const { return product_; }
    float* scores() const { return scores_; }

    // Keeps V as [32 tokens][dim][pair of tokens].
    void turn_values(const Places& places, int begin, int end, Ahead& ahead) {
        for (int place = begin; place < end; place += DEPTH) {
            const bf16 *low[BLOCK], *high[BLOCK];
            for (int pair = 0; pair < BLOCK; ++pair) {
                low[pair] = places.values[place / BLOCK + pair / 8] + pair % 8 * 2 * depth_;
                high[pair] = low[pair] + depth_;
            }
            for (int dim = 0; dim < depth_; dim += DEPTH) {
                Simd::turn_pairs(low, high, dim, values_ + place / 2 * depth_ + dim * BLOCK);
                ahead.fetch();
            }
        }
    }

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

    // Weights e^(score - top) from the scores, with top and total of product().
    void weigh(int begin, int end) {
        const int first = begin * lanes_, last = end * lanes_;
        Floats top = Simd::load(scores_ + first), top_2 = Simd::load(scores_ + first + LANES);
        for (int i = first + 2 * LANES; i < last; i += 2 * LANES) {
            top = Simd::max(top, Simd::load(scores_ + i));
            top_2 = Simd::max(top_2, Simd::load(scores_ + i + LANES));
        }
        top = Simd::mul(join_lanes(Simd::max(top, top_2), Simd::max), Simd::set(scale_));
        constexpr float LOG2_E = 1.44269504f;
        const Floats factor = Simd::set(scale_ * LOG2_E);
        const __mmask16 blind = _mm512_cmp_ps_mask(top, Simd::set(-INFINITY), _CMP_EQ_OQ);  // rows that see nothing
        const Floats shift = _mm512_mask_mov_ps(Simd::mul(top, Simd::set(-LOG2_E)), blind, Simd::set(0.0f));
        Floats total = Simd::set(0.0f), total_2 = total;
        for (int i = first; i < last; i += 2 * LANES) {
            const Floats a = power_of_two(Simd::fma(Simd::load(scores_ + i), factor, shift));
            const Floats b = power_of_two(Simd::fma(Simd::load(scores_ + i + LANES), factor, shift));
            total = Simd::add(total, a);
            total_2 = Simd::add(total_2, b);
            if (turned_) {  // [pair of tokens, lane], in words of two bf16
                const __m512i low = _mm512_srli_epi32(rounded(a), 16);
                _mm512_store_si512(weights_ + i / 2, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, rounded(b)));
            } else {
                Simd::store(scores_ + i, a);
                Simd::store(scores_ + i + LANES, b);
            }
        }
        Simd::store(product_ + depth_ * lanes_, top);
        Simd::store(product_ + depth_ * lanes_ + LANES, join_lanes(Simd::add(total, total_2), Simd::add));
    }

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
    static __m512i rounded(Floats x) {  // the upper half is x in bf16
        return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    }

    // The largest or the sum of each row, for all its lanes.
    template <class Join>
    Floats join_lanes(Floats x, const Join& join) const {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int distance = lanes_; distance < LANES; distance *= 2) {
            x = join(x, _mm512_permutexvar_ps(_mm512_xor_si512(lane, _mm512_set1_epi32(distance)), x));
        }
        return x;
    }

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

    const int lanes_, depth_;
    const bool turned_;
    const float scale_;
    float *const product_, *const scores_, *const weights_, *const values_;
};

}  // namespace
}  // namespace kvtier
