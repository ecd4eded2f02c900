// Up to 16 query rows over some positions of bf16 K and V: what is known of them between the products, whatever computes
// those. Scores are [token, lane], a lane being a row, so that maxima and sums run along lanes. Products of bf16 are exact
// in fp32, sums are fp32, weights are rounded to bf16. Included by matrix_*.hpp; knows no tables.
#pragma once

#include <cmath>

#include "ahead.hpp"

namespace kvtier {
namespace {

constexpr int BLOCK = 16;      // tokens that lie one after the other; the most lanes
constexpr int DEPTH = 32;      // bf16 numbers in a register: dims are padded to a multiple of it
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

// `begin` and `end` are multiples of DEPTH everywhere.
class RowBlock {
  public:
    static long scratch_floats(int depth) {
        return BLOCK * (depth + 2) + 3 * PLACES * BLOCK + PLACES * depth / 2;
    }

    // The lanes' part of product() is the caller's to lay out; then for each of LANES lanes the largest score and the sum
    // of the weights, those of a row in every lane that is its number modulo the lanes.
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

  protected:
    // `lanes`: 1, 2, 4, 8 or 16 rows. `depth`: dims padded to a multiple of DEPTH. `turned`: needs 16 lanes.
    RowBlock(int lanes, int depth, bool turned, float scale, float* scratch)
        : lanes_(lanes), depth_(depth), turned_(turned), scale_(scale), product_(scratch),
          scores_(product_ + BLOCK * (depth + 2)), weights_(scores_ + PLACES * BLOCK),
          values_(weights_ + 2 * PLACES * BLOCK) {}

    // Weights e^(score - top) from the scores, with top and total of product(). As PAIRS they go to weights_, rounded: two
    // vectors of scores become one of words, of which the first vector's weights are the lower halves. Else to scores_.
    template <bool PAIRS>
    void weigh_scores(int begin, int end) {
        const int first = begin * lanes_, last = end * lanes_;
        Floats top = Simd::load(scores_ + first), top_2 = Simd::load(scores_ + first + LANES);
        for (int i = first + 2 * LANES; i < last; i += 2 * LANES) {
            top = Simd::max(top, Simd::load(scores_ + i));
            top_2 = Simd::max(top_2, Simd::load(scores_ + i + LANES));
        }
        top = join_lanes(Simd::max(top, top_2), Simd::max);
        constexpr float LOG2_E = 1.44269504f;
        const Floats factor = Simd::set(scale_ * LOG2_E);
        const __mmask16 blind = _mm512_cmp_ps_mask(top, Simd::set(-INFINITY), _CMP_EQ_OQ);  // rows that see nothing
        const Floats base = _mm512_mask_mov_ps(top, blind, Simd::set(0.0f));
        // Less the largest before it is scaled: so that one weighs 1, however large scores are.
        const auto weight = [&](const float* score) {
            return power_of_two(Simd::mul(Simd::sub(Simd::load(score), base), factor));
        };
        Floats total = Simd::set(0.0f), total_2 = total;
        for (int i = first; i < last; i += 2 * LANES) {
            const Floats a = weight(scores_ + i), b = weight(scores_ + i + LANES);
            total = Simd::add(total, a);
            total_2 = Simd::add(total_2, b);
            if constexpr (PAIRS) {
                const __m512i low = _mm512_srli_epi32(rounded(a), 16);
                _mm512_store_si512(weights_ + i / 2, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, rounded(b)));
            } else {
                Simd::store(scores_ + i, a);
                Simd::store(scores_ + i + LANES, b);
            }
        }
        Simd::store(product_ + depth_ * lanes_, Simd::mul(top, Simd::set(scale_)));
        Simd::store(product_ + depth_ * lanes_ + LANES, join_lanes(Simd::add(total, total_2), Simd::add));
    }

    static __m512i rounded(Floats x) {  // the upper half is x in bf16
        return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    }

    const int lanes_, depth_;
    const bool turned_;
    const float scale_;
    float *const product_, *const scores_, *const weights_, *const values_;

  private:
    // The largest or the sum of each row, for all its lanes.
    template <class Join>
    Floats join_lanes(Floats x, const Join& join) const {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int distance = lanes_; distance < LANES; distance *= 2) {
            x = join(x, _mm512_permutexvar_ps(_mm512_xor_si512(lane, _mm512_set1_epi32(distance)), x));
        }
        return x;
    }
};

}  // namespace
}  // namespace kvtier
