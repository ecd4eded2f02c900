// Compiled with AVX512_BF16's flags: include nothing here that other files share inline code with.
#include "few_rows.hpp"

#include "simd_avx512.hpp"

namespace kvtier {
namespace {

constexpr int TILE_COLUMNS = 16;        // of the result: rows of weights that lie one after the other
constexpr int STEP = 32;                // of the inner dimension: a register of bf16
constexpr int ROWS_MAX = 8;             // of x that are multiplied at once
constexpr int NEAR_VALUES = 12 * 1024;  // of x that the nearest cache holds beside sums and weights
constexpr int DEPTH = 512;              // of the inner dimension for all rows of x, if they are more than that
constexpr int ASK_BYTES = 4096;         // ahead of where weights are read
constexpr int TASK_TILES = 4;           // in a task: this or a multiple

constexpr int SUMS = 16;  // that are added up together

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

// How rows of x are multiplied: in groups of 1, 2, 4 or 8, of which the last is filled up.
struct Groups {
    long rows, count;
    long depth;  // of the inner dimension that is computed at once: for all groups, before weights leave the nearest cache
};

Groups groups_of(const FewRowsArguments& arguments) {
    const long rows = arguments.rows, most = arguments.in_dim * ROWS_MAX > NEAR_VALUES ? ROWS_MAX / 2 : ROWS_MAX;
    long group = 1;
    while (group < rows && group < most) group *= 2;
    const long count = (rows + group - 1) / group;
    return {group, count, count > 1 && most < ROWS_MAX ? DEPTH : arguments.in_dim};
}

// x as [group, in_dim / STEP, row, STEP], each step on a line of its own.
void pack(const FewRowsArguments& arguments, const Groups& groups) {
    for (long place = 0; place < groups.count * groups.rows; ++place) {
        const long row = place < arguments.rows ? place : arguments.rows - 1;  // for what is missing the last one again
        bf16* to = arguments.packed + place / groups.rows * groups.rows * arguments.in_dim + place % groups.rows * STEP;
        for (long k = 0; k < arguments.in_dim; k += STEP) {
            __builtin_memcpy(to + k * groups.rows, arguments.x + row * arguments.x_stride + k, STEP * sizeof(bf16));
        }
    }
}

// Weights are read in streams that lie far apart, each in order: so the prefetcher of the L2 cache follows them, and little
// or nothing has to be asked for (docs/LOG.md). A set is one row of weights of each stream.
struct Streams {
    const bf16* weight;  // of the first stream
    long distance;       // from stream to stream
};

// What a thread needs for one group.
struct Scratch {
    Sums sums[SUMS];  // [column, row, stream], as many columns as there is room for
    float totals[TILE_COLUMNS * SUMS];  // [column, row, stream] of a tile
};

// A group of ROWS rows of x with one set, over `depth` values of the inner dimension, from zero or on top of `sums`
// [row, stream].
template <int ROWS, int STREAMS, bool ASK>
void multiply(const bf16* x, const Streams& streams, long depth, bool from_zero, Sums* sums) {
    constexpr int COUNT = ROWS * STREAMS;
    __m512 s[COUNT];
#pragma GCC unroll 16  // or gcc 12 keeps a copy in memory, too
    for (int i = 0; i < COUNT; ++i) s[i] = from_zero ? _mm512_setzero_ps() : sums[i];
    for (long k = 0; k < depth; k += STEP, x += ROWS * STEP) {
        __m512bh weights[STREAMS];
#pragma GCC unroll 4
        for (int j = 0; j < STREAMS; ++j) {
            const bf16* weight = streams.weight + j * streams.distance + k;
            weights[j] = load(weight);
            if (ASK) __builtin_prefetch(reinterpret_cast<const char*>(weight) + ASK_BYTES, 0, 2);  // into the L2 cache
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            const __m512bh values = load(x + i * STEP);
#pragma GCC unroll 4
            for (int j = 0; j < STREAMS; ++j) {
                s[i * STREAMS + j] = _mm512_dpbf16_ps(s[i * STREAMS + j], weights[j], values);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) sums[i] = s[i];
}

// All rows of x with one set; their sums begin at `place`. With few rows weights are read as fast as anything can be; more
// take so long that the prefetcher, which stays a fixed way ahead, comes late and has to be helped.
template <int ROWS, int STREAMS>
void multiply_set(const FewRowsArguments& arguments, const Groups& groups, const Streams& streams, long place,
                  Scratch* scratch) {
    const bool ask = groups.count * ROWS >= ROWS_MAX;
    for (long k = 0; k < arguments.in_dim; k += groups.depth) {
        const long depth = arguments.in_dim - k < groups.depth ? arguments.in_dim - k : groups.depth;
        const Streams part{streams.weight + k, streams.distance};
        for (long group = 0; group < groups.count; ++group) {
            const bf16* x = arguments.packed + (group * arguments.in_dim + k) * ROWS;
            Sums* own = scratch[group].sums + place;
            if (ask && group == groups.count - 1) multiply<ROWS, STREAMS, true>(x, part, depth, k == 0, own);
            else multiply<ROWS, STREAMS, false>(x, part, depth, k == 0, own);
        }
    }
}

// A tile of each stream, of which the first one's is given: rounded, from totals [column, row, stream] of each group.
template <int ROWS, int STREAMS>
void write_tiles(const FewRowsArguments& arguments, long tile, long tiles, long group, const float* totals) {
    constexpr int COUNT = ROWS * STREAMS;
    alignas(64) float turned[TILE_COLUMNS * SUMS];
    const float* columns[TILE_COLUMNS];
    for (int i = 0; i < TILE_COLUMNS; ++i) columns[i] = totals + i * COUNT;
    Simd::transpose(columns, COUNT, turned, TILE_COLUMNS);
    for (int i = 0; i < COUNT && group * ROWS + i / STREAMS < arguments.rows; ++i) {
        const long row = group * ROWS + i / STREAMS, column = (tile + i % STREAMS * tiles) * TILE_COLUMNS;
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(turned + i * TILE_COLUMNS));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(arguments.out + row * arguments.out_dim + column), rounded);
    }
}

// Tiles first .. first + STREAMS * tiles - 1, as many in each stream.
template <int ROWS, int STREAMS>
void multiply_streams(const FewRowsArguments& arguments, const Groups& groups, long first, long tiles, Scratch* scratch) {
    constexpr int COUNT = ROWS * STREAMS, COLUMNS = SUMS / COUNT;
    const long tile_values = TILE_COLUMNS * arguments.in_dim;
    for (long tile = first; tile < first + tiles; ++tile) {
        for (long column = 0; column < TILE_COLUMNS; ++column) {
            const Streams streams{arguments.weight + tile * tile_values + column * arguments.in_dim, tiles * tile_values};
            multiply_set<ROWS, STREAMS>(arguments, groups, streams, column % COLUMNS * COUNT, scratch);
            if ((column + 1) % COLUMNS > 0) continue;
            for (long group = 0; group < groups.count; ++group) {
                _mm512_store_ps(scratch[group].totals + column / COLUMNS * SUMS, totals(scratch[group].sums));
            }
        }
        for (long group = 0; group < groups.count; ++group) {
            write_tiles<ROWS, STREAMS>(arguments, tile, tiles, group, scratch[group].totals);
        }
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
    const long taken = (share + TASK_TILES - 1) / TASK_TILES * TASK_TILES;
    return taken < left ? first + taken : tiles;
}

Span span_at(int task, long tiles, int threads) {
    Span span{0, span_end(0, tiles, threads)};
    for (int i = 0; i < task; ++i) span = {span.end, span_end(span.end, tiles, threads)};
    return span;
}

template <int ROWS, int STREAMS>
void multiply_span(const FewRowsArguments& arguments, const Groups& groups, Span span, Scratch* scratch) {
    const long tiles = (span.end - span.first) / STREAMS, rest = span.first + tiles * STREAMS;
    multiply_streams<ROWS, STREAMS>(arguments, groups, span.first, tiles, scratch);
    multiply_streams<ROWS, 1>(arguments, groups, rest, span.end - rest, scratch);
}

void multiply_span(const FewRowsArguments& arguments, const Groups& groups, Span span, Scratch* scratch) {
    switch (groups.rows) {  // as many streams as the registers hold sums of, up to 4
        case 1: return multiply_span<1, 1>(arguments, groups, span, scratch);
        case 2: return multiply_span<2, 2>(arguments, groups, span, scratch);
        case 4: return multiply_span<4, 4>(arguments, groups, span, scratch);
        default: return multiply_span<8, 2>(arguments, groups, span, scratch);
    }
}

}  // namespace

void few_rows_dot(Pool& pool, const FewRowsArguments& arguments) {
    const Groups groups = groups_of(arguments);
    pack(arguments, groups);
    const long tiles = arguments.out_dim / TILE_COLUMNS;
    int tasks = 0;
    for (long end = 0; end < tiles; end = span_end(end, tiles, arguments.threads)) ++tasks;
    const auto task = [&](int index, float* scratch) {
        multiply_span(arguments, groups, span_at(index, tiles, arguments.threads), reinterpret_cast<Scratch*>(scratch));
    };
    run_tasks(pool, tasks, std::size_t(groups.count) * sizeof(Scratch) / sizeof(float), task);
}

}  // namespace kvtier
