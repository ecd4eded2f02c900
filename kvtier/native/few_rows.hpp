// bf16 products of a few rows with a weight matrix, which decoding lives on: on the matrix unit of the CPU (AMX,
// few_rows.cpp) or with its dot products of pairs (AVX512_BF16, few_rows_dot.cpp).
//
// Knows only raw memory; each file is compiled for its instructions alone. Weights are used as they lie, row by row, so
// that a product costs little more than reading them.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace kvtier {

constexpr int FEW_ROWS = 64;      // above it the products of torch are as fast
constexpr int FEW_ROWS_DOT = 16;  // so for the dot products

// out [rows, out_dim] = x [rows, in_dim] times the transpose of weight [out_dim, in_dim]; sums are fp32, in an order
// that in_dim alone decides. 1 to `rows_max` rows of the kernel, in_dim a multiple of 32, out_dim of 16. `packed` holds
// rows_max * in_dim values and is 64-byte aligned.
struct FewRowsArguments {
    const bf16* x;
    const bf16* weight;
    bf16* out;
    bf16* packed;
    std::int64_t rows, in_dim, out_dim, x_stride;
    int threads;  // of the pool
};

// One way to compute them; none where rows_max is 0. A row's bits depend on no other row and not on threads.
struct FewRows {
    int rows_max;
    void (*multiply)(Pool&, const FewRowsArguments&);
};

// Whether the CPU has the unit and the system lets this process use it; asks the system for it.
bool few_rows_supported();

void few_rows(Pool& pool, const FewRowsArguments& arguments);

// Only if dot_kernels().
void few_rows_dot(Pool& pool, const FewRowsArguments& arguments);

}  // namespace kvtier
