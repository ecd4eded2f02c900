// fp32 product with a weight matrix, whose rows have the same bits in any company. Included by isa_*.cpp after tile.hpp.
//
// A task is 64 columns of the result. It transposes the weights in pieces that stay in the L1 cache, once for every
// ROW_BLOCK rows of x.
#pragma once

namespace kvtier {
namespace {

constexpr int PANEL = 64;
constexpr int PIECE = 128;  // of the inner dimension: 32 KiB of weights
constexpr int ROW_BLOCK = 192;

// weights [PIECE, PANEL] = the transpose of weight [column .., k ..], zero where the panel passes the last column.
inline void transpose_piece(const LinearArguments& arguments, long column, long k, int count, float* weights) {
    static const float zeros[PIECE] = {};
    for (int place = 0; place < PANEL; place += LANES) {
        const float* rows[LANES];
        for (int i = 0; i < LANES; ++i) {
            const long row = column + place + i;
            rows[i] = row < arguments.out_dim ? arguments.weight + row * arguments.in_dim + k : zeros;
        }
        Simd::transpose(rows, count, weights + place, PANEL);
    }
}

void linear(Pool& pool, const LinearArguments& arguments) {
    const auto panel = [&](int task, float* scratch) {
        float* weights = scratch;
        float* sums = scratch + PIECE * PANEL;  // [ROW_BLOCK, PANEL]
        const long column = long(task) * PANEL;
        const int columns = int(column + PANEL <= arguments.out_dim ? PANEL : arguments.out_dim - column);
        for (long first = 0; first < arguments.tokens; first += ROW_BLOCK) {
            const int rows = int(first + ROW_BLOCK <= arguments.tokens ? ROW_BLOCK : arguments.tokens - first);
            for (int i = 0; i < rows * PANEL; i += LANES) Simd::store(sums + i, Simd::set(0.0f));
            for (long k = 0; k < arguments.in_dim; k += PIECE) {
                const int count = int(k + PIECE <= arguments.in_dim ? PIECE : arguments.in_dim - k);
                transpose_piece(arguments, column, k, count, weights);
                const auto weight = [&](int inner, int place) { return weights + inner * PANEL + place; };
                for (int row = 0; row < rows; row += TILE_ROWS) {
                    multiply(smaller(TILE_ROWS, rows - row), arguments.x + (first + row) * arguments.x_stride + k,
                             arguments.x_stride, weight, 0, count, sums + row * PANEL, PANEL, PANEL);
                }
            }
            for (int row = 0; row < rows; ++row) {
                for (int i = 0; i < columns; i += LANES) {
                    const int count = smaller(LANES, columns - i);
                    Floats x = Simd::load(sums + row * PANEL + i);
                    if (arguments.bias) x = Simd::add(x, Simd::load(arguments.bias + column + i, count));
                    Simd::store(arguments.out + (first + row) * arguments.out_dim + column + i, x, count);
                }
            }
        }
    };
    run_tasks(pool, int((arguments.out_dim + PANEL - 1) / PANEL), (PIECE + ROW_BLOCK) * PANEL, panel);
}

}  // namespace
}  // namespace kvtier
