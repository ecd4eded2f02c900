// Compiled with AVX512_BF16's flags: include nothing here that other files share inline code with.
#include "few_rows.hpp"

#include <immintrin.h>

#include "ahead.hpp"

namespace kvtier {
namespace {

constexpr int TILE_COLUMNS = 16;         // of the result: rows of weights that lie one after the other
constexpr int GROUP_ROWS = 8;            // of x; the weights of a tile are still in a near cache for the next group
constexpr int STEP = 32;                 // of the inner dimension: a register of bf16
constexpr int NEAR_VALUES = 12 * 1024;   // of x that the nearest cache holds beside sums and weights
constexpr int TASK_TILES_MIN = 2;

using Sums = __m512;  // of one row with one column; each lane has the sum of its own pairs of the inner dimension

// Loaded as what it is: cast from integers, gcc 12 takes it through memory.
__m512bh load(const bf16* from) {
    using Anywhere = __m512bh __attribute__((aligned(2), may_alias));
    return *reinterpret_cast<const Anywhere*>(from);
}

__m512 add_singles(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

__m512 add_pairs(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

__m512 add_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// The totals of 16 sums, in their order; the lanes of each are added in the same order.
__m512 totals(const Sums* sums) {
    __m512 quads[4];
    for (int i = 0; i < 4; ++i) {
        const Sums* four = sums + 4 * i;
        quads[i] = add_pairs(add_singles(four[0], four[1]), add_singles(four[2], four[3]));
    }
    return add_quarters(add_quarters(quads[0], quads[1]), add_quarters(quads[2], quads[3]));
}

// Up to GROUP_ROWS rows of x, padded to 1, 2, 4 or 8.
struct Group {
    long first, rows, padded_rows;
    bf16* packed;  // [in_dim / STEP, padded_rows, STEP], each step on a line of its own
};

Group group_at(const FewRowsArguments& arguments, long first) {
    const long rows = arguments.rows - first < GROUP_ROWS ? arguments.rows - first : GROUP_ROWS;
    return {first, rows, rows > 4 ? 8 : rows > 2 ? 4 : rows, arguments.packed + first * arguments.in_dim};
}

void pack(const FewRowsArguments& arguments, const Group& group) {
    for (long row = 0; row < group.padded_rows; ++row) {  // in place of what is missing the last row is computed again
        const bf16* x = arguments.x + (group.first + (row < group.rows ? row : group.rows - 1)) * arguments.x_stride;
        for (long k = 0; k < arguments.in_dim; k += STEP) {
            __builtin_memcpy(group.packed + k * group.padded_rows + row * STEP, x + k, STEP * sizeof(bf16));
        }
    }
}

// ROWS rows of x with the first COLUMNS rows of weights, over `depth` values of the inner dimension; added to `sums`.
template <int ROWS, int COLUMNS>
__attribute__((noinline)) void multiply(const bf16* x, const bf16* weight, long in_dim, long depth, Sums* sums,
                                        Ahead& ahead) {
    constexpr int PACE = COLUMNS < 4 ? 4 / COLUMNS : 1;  // steps that read what one turn of `ahead` asks for
    __m512 s[TILE_COLUMNS];  // [row, column]
#pragma GCC unroll 16  // or gcc 12 keeps a copy in memory, too
    for (int i = 0; i < TILE_COLUMNS; ++i) s[i] = sums[i / COLUMNS * TILE_COLUMNS + i % COLUMNS];
    for (long k = 0; k < depth; k += STEP, x += ROWS * STEP) {
        __m512bh weights[COLUMNS];
        for (int j = 0; j < COLUMNS; ++j) weights[j] = load(weight + j * in_dim + k);
        for (int i = 0; i < ROWS; ++i) {
            const __m512bh values = load(x + i * STEP);
            for (int j = 0; j < COLUMNS; ++j) {
                s[i * COLUMNS + j] = _mm512_dpbf16_ps(s[i * COLUMNS + j], weights[j], values);
            }
        }
        if (k % (PACE * STEP) == 0) ahead.fetch();
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_COLUMNS; ++i) sums[i / COLUMNS * TILE_COLUMNS + i % COLUMNS] = s[i];
}

// One tile of 16 columns for a group of ROWS rows.
template <int ROWS>
void multiply_group(const FewRowsArguments& arguments, const Group& group, long column, Sums* sums, Ahead& ahead) {
    constexpr int COLUMNS = TILE_COLUMNS / ROWS;
    const long in_dim = arguments.in_dim, near = NEAR_VALUES / ROWS, blocks = (in_dim + near - 1) / near;
    const long depth = (in_dim / STEP + blocks - 1) / blocks * STEP;
    for (int i = 0; i < ROWS * TILE_COLUMNS; ++i) sums[i] = _mm512_setzero_ps();
    for (long k = 0; k < in_dim; k += depth) {
        const long part = in_dim - k < depth ? in_dim - k : depth;
        for (int j = 0; j < TILE_COLUMNS; j += COLUMNS) {
            const bf16* weight = arguments.weight + (column + j) * in_dim + k;
            multiply<ROWS, COLUMNS>(group.packed + k * ROWS, weight, in_dim, part, sums + j, ahead);
        }
    }
    for (long i = 0; i < group.rows; ++i) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(totals(sums + i * TILE_COLUMNS));
        bf16* out = arguments.out + (group.first + i) * arguments.out_dim + column;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
    }
}

void multiply_tile(const FewRowsArguments& arguments, long column, Sums* sums, Ahead& ahead) {
    for (long row = 0; row < arguments.rows; row += GROUP_ROWS) {
        const Group group = group_at(arguments, row);
        if (group.padded_rows == 1) multiply_group<1>(arguments, group, column, sums, ahead);
        else if (group.padded_rows == 2) multiply_group<2>(arguments, group, column, sums, ahead);
        else if (group.padded_rows == 4) multiply_group<4>(arguments, group, column, sums, ahead);
        else multiply_group<8>(arguments, group, column, sums, ahead);
    }
}

// Tiles of one task.
struct Span {
    long first, end;
};

// Where the next task ends: after half of a thread's share of what is left, so that few tasks begin and all threads end
// at about the same time.
long span_end(long first, long tiles, int threads) {
    const long left = tiles - first, share = threads == 1 ? left : (left + 2 * threads - 1) / (2 * threads);
    const long taken = share < TASK_TILES_MIN ? TASK_TILES_MIN : share;
    return taken < left ? first + taken : tiles;
}

Span span_at(int task, long tiles, int threads) {
    Span span{0, span_end(0, tiles, threads)};
    for (int i = 0; i < task; ++i) span = {span.end, span_end(span.end, tiles, threads)};
    return span;
}

void multiply_tiles(const FewRowsArguments& arguments, Span span, Sums* sums) {
    const long tile_bytes = 2 * TILE_COLUMNS * arguments.in_dim;
    const long rows = group_at(arguments, 0).padded_rows;
    const long turns = rows < 4 ? rows : 4;  // of `ahead`, while a tile is multiplied by a step of the inner dimension
    Ahead ahead;
    const auto expect = [&](long tile) {
        ahead.clear();
        const char* weight = reinterpret_cast<const char*>(arguments.weight) + tile * tile_bytes;
        if (tile < span.end) ahead.expect(weight, tile_bytes);
        ahead.start(int(arguments.in_dim / STEP * turns));
    };
    expect(span.first);
    ahead.fetch_all();
    for (long tile = span.first; tile < span.end; ++tile) {
        expect(tile + 1);
        multiply_tile(arguments, tile * TILE_COLUMNS, sums, ahead);
    }
}

}  // namespace

void few_rows_dot(Pool& pool, const FewRowsArguments& arguments) {
    for (long row = 0; row < arguments.rows; row += GROUP_ROWS) pack(arguments, group_at(arguments, row));
    const long tiles = arguments.out_dim / TILE_COLUMNS;
    int tasks = 0;
    for (long end = 0; end < tiles; end = span_end(end, tiles, arguments.threads)) ++tasks;
    const auto task = [&](int index, float* scratch) {
        multiply_tiles(arguments, span_at(index, tiles, arguments.threads), reinterpret_cast<Sums*>(scratch));
    };
    run_tasks(pool, tasks, GROUP_ROWS * TILE_COLUMNS * 16, task);
}

}  // namespace kvtier
