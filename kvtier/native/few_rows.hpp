// bf16 products of a few rows with a weight matrix, on the matrix unit of the CPU (AMX), which decoding lives on.
//
// Knows only raw memory; few_rows.cpp is compiled for that unit alone. Weights are used as they lie, row by row, so
// that a product costs little more than reading them.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace kvtier {

constexpr int FEW_ROWS = 64;  // above it the products of torch are as fast

// out [rows, out_dim] = x [rows, in_dim] times the transpose of weight [out_dim, in_dim]; sums are fp32, in the order of
// in_dim. 1 to FEW_ROWS rows, in_dim a multiple of 32, out_dim of 16. `packed` holds FEW_ROWS * in_dim values.
struct FewRowsArguments {
    const bf16* x;
    const bf16* weight;
    bf16* out;
    bf16* packed;
    std::int64_t rows, in_dim, out_dim, x_stride;
};

// Whether the CPU has the unit and the system lets this process use it; asks the system for it.
bool few_rows_supported();

void few_rows(Pool& pool, const FewRowsArguments& arguments);

}  // namespace kvtier
