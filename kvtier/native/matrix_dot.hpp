// Attention of up to 16 query rows over some positions of bf16 K and V, with dot products of pairs (AVX512_BF16).
//
// A register holds as many words of each lane's query as there are lanes less of them, and meets the same words of K,
// repeated for each lane as they are loaded: K is used as it lies. V becomes words of two tokens' numbers, in registers or,
// if it is to serve many rows, once for all of them. Included by isa_dot.cpp before attend_bf16.hpp.
#pragma once

#include "row_block.hpp"

namespace kvtier {
namespace {

// Loaded as what they are: cast from integers, gcc 12 takes them through memory.
inline __m512bh load_words(const void* from) {
    using Anywhere = __m512bh __attribute__((aligned(2), may_alias));
    return *static_cast<const Anywhere*>(from);
}

// WORDS words, as often as a register holds them.
template <int WORDS>
inline __m512bh repeat_words(const void* from) {
    if constexpr (WORDS == 16) return load_words(from);
    if constexpr (WORDS == 8) return (__m512bh)_mm512_broadcast_i32x8(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
    if constexpr (WORDS == 4) return (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
    if constexpr (WORDS == 2) {
        long long two;
        __builtin_memcpy(&two, from, sizeof(two));
        return (__m512bh)_mm512_set1_epi64(two);
    }
    int one;
    __builtin_memcpy(&one, from, sizeof(one));
    return (__m512bh)_mm512_set1_epi32(one);
}

// product() is [dim, lane] if V is turned, else [half, lane, half of depth]: of each 8 dims the first 4 are in one half.
class DotUnit : public RowBlock {
  public:
    DotUnit(int lanes, int depth, bool turned, float scale, float* scratch)
        : RowBlock(lanes, depth, turned, scale, scratch) {}

    // Where a word of two dims of a lane's query lies.
    static int query_place(int lanes, int pair, int lane) {
        const int words = LANES / lanes;
        return pair / words * LANES + lane * words + pair % words;
    }
    // 32 dims of a row from what product() has in its two halves, each number in the lower half of a word.
    static __m512i join_dims(__m512i first, __m512i second) { return _mm512_packus_epi32(first, second); }

    // Unscaled scores of `queries`, words in query_place()s.
    void score(const float* queries, const Places& places, int begin, int end, Ahead& ahead) {
        switch (lanes_) {
            case 1: return score_lanes<1>(queries, places, begin, end, ahead);
            case 2: return score_lanes<2>(queries, places, begin, end, ahead);
            case 4: return score_lanes<4>(queries, places, begin, end, ahead);
            case 8: return score_lanes<8>(queries, places, begin, end, ahead);
            default: return score_lanes<16>(queries, places, begin, end, ahead);
        }
    }

    // Weights from the scores, with top and total of product().
    void weigh(int begin, int end) { weigh_scores<true>(begin, end); }

    // product() = weights times V.
    void multiply(const Places& places, int begin, int end, Ahead& ahead) {
        if (turned_) return multiply_turned(begin, end);
        switch (lanes_) {
            case 1: return multiply_lanes<1, 1>(places, begin, end, ahead);
            case 2: return multiply_lanes<2, 2>(places, begin, end, ahead);
            case 4: return multiply_lanes<4, 4>(places, begin, end, ahead);
            case 8: return multiply_lanes<8, 8>(places, begin, end, ahead);
            default: return multiply_lanes<16, 8>(places, begin, end, ahead);
        }
    }

  private:
    template <int ROWS>
    void score_lanes(const float* queries, const Places& places, int begin, int end, Ahead& ahead) {
        constexpr int WORDS = LANES / ROWS;
        const int fetches = depth_ / DEPTH;
        for (int place = begin; place < end; place += BLOCK) {
            __m512 sums[BLOCK];
            score_block<WORDS>(queries, places.keys[place / BLOCK], sums);
            join_words<WORDS>(sums);
            for (int i = 0; i < ROWS; ++i) Simd::store(scores_ + place * ROWS + i * LANES, sums[i]);
            for (int i = 0; i < fetches; ++i) ahead.fetch();
        }
    }

    // sums[token] as [lane, word].
    template <int WORDS>
    void score_block(const float* queries, const bf16* keys, __m512 (&sums)[BLOCK]) const {
        const long stride = depth_;
#pragma GCC unroll 16
        for (int token = 0; token < BLOCK; ++token) sums[token] = _mm512_setzero_ps();
        const bf16* quarters[4] = {keys, keys + 4 * stride, keys + 8 * stride, keys + 12 * stride};
        for (int dim = 0; dim < depth_; dim += 2 * WORDS, queries += LANES) {
            const __m512bh query = load_words(queries);
#pragma GCC unroll 16
            for (int token = 0; token < BLOCK; ++token) {
                const __m512bh key = repeat_words<WORDS>(quarters[token / 4] + token % 4 * stride);
                sums[token] = _mm512_dpbf16_ps(sums[token], query, key);
            }
#pragma GCC unroll 4
            for (const bf16*& quarter : quarters) quarter += 2 * WORDS;
        }
    }

    // From [token][lane, word] to [token, lane] in the first registers: adds words 2 i and 2 i + 1, until one is left. What
    // is left of two tokens follows each other in one register.
    template <int WORDS, int COUNT = BLOCK>
    static void join_words(__m512 (&sums)[BLOCK]) {
        if constexpr (WORDS > 1) {
            const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT / 2; ++i) {
                const __m512 a = sums[2 * i], b = sums[2 * i + 1];
                sums[i] = _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
            }
            join_words<WORDS / 2, COUNT / 2>(sums);
        }
    }

    // `ROWS` lanes, so many of them at a time as the registers hold sums of.
    template <int ROWS, int GROUP>
    void multiply_lanes(const Places& places, int begin, int end, Ahead& ahead) {
        for (int lane = 0; lane < ROWS; lane += GROUP) {
            int dim = 0;
            if constexpr (GROUP <= 4) {
                for (; dim + 2 * DEPTH <= depth_; dim += 2 * DEPTH) {
                    multiply_dims<ROWS, GROUP, 2>(places, begin, end, lane, dim, ahead);
                }
            }
            for (; dim < depth_; dim += DEPTH) multiply_dims<ROWS, GROUP, 1>(places, begin, end, lane, dim, ahead);
        }
    }

    // The weights of two tokens are a word; they lie as far apart as one vector of scores has tokens.
    template <int ROWS, int GROUP, int DEPTHS>
    void multiply_dims(const Places& places, int begin, int end, int lane, int first_dim, Ahead& ahead) {
        constexpr int APART = LANES / ROWS;
        __m512 sums[GROUP][DEPTHS][2];
#pragma GCC unroll 16
        for (int i = 0; i < GROUP * DEPTHS * 2; ++i) sums[i / DEPTHS / 2][i / 2 % DEPTHS][i % 2] = _mm512_setzero_ps();
        const float* weights = weights_ + begin * ROWS / 2 + lane;
        for (int place = begin; place < end; place += 2 * APART) {
            const bf16* low = value_at(places, place) + first_dim;
            const bf16* high = value_at(places, place + APART) + first_dim;
            for (int i = 0; i < APART; ++i, low += depth_, high += depth_, weights += ROWS) {
#pragma GCC unroll 2
                for (int j = 0; j < DEPTHS; ++j) {
                    const __m512i a = _mm512_loadu_si512(low + j * DEPTH), b = _mm512_loadu_si512(high + j * DEPTH);
                    const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b), second = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
                    for (int row = 0; row < GROUP; ++row) {
                        const __m512bh weight = repeat_words<1>(weights + row);
                        sums[row][j][0] = _mm512_dpbf16_ps(sums[row][j][0], first, weight);
                        sums[row][j][1] = _mm512_dpbf16_ps(sums[row][j][1], second, weight);
                    }
                }
            }
            if (lane == 0 && (place + 2 * APART) % BLOCK == 0) {
                for (int i = 0; i < DEPTHS * larger(1, 2 * APART / BLOCK); ++i) ahead.fetch();
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < GROUP * DEPTHS * 2; ++i) {
            const int row = i / DEPTHS / 2, j = i / 2 % DEPTHS, half = i % 2;
            float* to = product_ + (half * ROWS + lane + row) * depth_ / 2 + first_dim / 2 + j * LANES;
            Simd::store(to, sums[row][j][half]);
        }
    }

    const bf16* value_at(const Places& places, int place) const {
        return places.values[place / BLOCK] + place % BLOCK * depth_;
    }

    void multiply_turned(int begin, int end) {
        for (int dim = 0; dim < depth_; dim += BLOCK) {
            __m512 sums[BLOCK];
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK; ++i) sums[i] = _mm512_setzero_ps();
            for (int place = begin; place < end; place += DEPTH) {
                const float* values = values_ + place / 2 * depth_ + dim * BLOCK;
                const float* weights = weights_ + place / 2 * BLOCK;
                for (int pair = 0; pair < BLOCK; ++pair) {
                    const __m512bh weight = load_words(weights + pair * LANES);
#pragma GCC unroll 16
                    for (int i = 0; i < BLOCK; ++i) {
                        sums[i] = _mm512_dpbf16_ps(sums[i], weight, repeat_words<1>(values + i * BLOCK + pair));
                    }
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK; ++i) Simd::store(product_ + (dim + i) * BLOCK, sums[i]);
        }
    }
};

}  // namespace
}  // namespace kvtier
