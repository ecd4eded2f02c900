// What a set of kernels offers: plain structures of addresses and sizes, and one table of functions for each ISA.
//
// Owns no memory and no threads. module.cpp and layers.cpp fill the structures; isa_*.cpp provide the tables. Strides are in elements.
#pragma once

#include <cstdint>

#include "tasks.hpp"

namespace kvtier {

constexpr int SPAN = 64;  // SPAN_TOKENS of kvtier/attention/base.py

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

// Geometry of one layer's slice of a row: K [kv_head, token, dim], then V at value_bytes.
struct Rows {
    Type type;
    int kv_heads, dim, block_tokens;
    std::int64_t layer_bytes, value_bytes, head_bytes;
};

struct AttendArguments {
    Rows rows;
    Type q_type;  // of q and of out
    const void* q;
    std::int64_t q_token_stride, q_head_stride;
    void* out;   // [token, head, dim]
    float* lse;  // [token, head]
    const std::int64_t* tables;
    std::int64_t table_stride;
    const std::int32_t* query_starts;
    const std::int32_t* lengths;
    int sequences, heads;
    float scale;
    int window;  // 0: none
};

// Consecutive queries of one sequence, for one KV head. Made by plan.cpp, as are its companions.
struct Tile {
    int sequence, kv_head;
    int first_token, queries;  // within q
    int position;              // of the first query
    int first_span, end_span;  // spans that any of the queries sees
    int groups;                  // tasks that the spans are cut into
    int open_groups;             // those not finished yet; atomic, used only if groups > 1
    std::int64_t partial_place;  // of its first span in `partials`, used only if groups > 1
};

struct Task {
    int tile, group;
};

struct AttendTasks {
    Tile* tiles;
    const Task* tasks;
    int count;
    int tile_rows_max;  // queries x query heads of a KV head
    float* partials;    // partial_floats() for each span of a tile
};

constexpr int CONVERTED_ROWS = 96;  // query rows of a tile that repay the conversion of a span's K and V to fp32

constexpr int padded(int dim) { return (dim + 15) / 16 * 16; }

// What a kernel may keep of a tile's rows over a span: sums of as many numbers as the dim has, a maximum and a total. There
// is room for blocks of 16 rows, or one block of a power of two.
constexpr std::int64_t partial_floats(int rows, int dim) {
    int block_rows = 1;
    while (block_rows < rows && block_rows < 16) block_rows *= 2;
    return std::int64_t(rows + block_rows - 1) / block_rows * ((dim + 31) / 32 * 32 * block_rows + 32);
}

struct AppendArguments {
    Rows rows;
    const void* k;
    const void* v;
    std::int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    const std::int64_t* append_rows;
    const std::int32_t* append_offsets;
    int tokens;
};

// `update` null: a plain rmsnorm of x. Otherwise x is the residual, to which update is added in place.
struct NormArguments {
    Type x_type, update_type, out_type;  // weight has out_type
    void* x;
    const void* update;
    const void* weight;
    void* out;
    std::int64_t outer, inner, outer_stride, inner_stride;  // x [outer, inner, dim]; update and out are contiguous
    std::int64_t dim;
    float eps;
};

// x [token, head, dim], rotated in place; cos and sin [token, dim / 2].
struct RopeArguments {
    Type type;
    void* x;
    std::int64_t tokens, heads, dim, token_stride, head_stride;
    const float* cos;
    const float* sin;
};

struct SiluArguments {
    Type type;
    const void* gate_up;
    void* out;
    std::int64_t tokens, inter, token_stride;
};

// x [row, dim] plus bias [dim], in place.
struct BiasArguments {
    Type type;
    void* x;
    const void* bias;
    std::int64_t rows, dim;
};

// out [row, dim] = x [row, dim] as fp32.
struct WidenArguments {
    Type type;
    const void* x;
    float* out;
    std::int64_t rows, dim;
};

// out [token, out_dim] = x [token, in_dim] times the transpose of weight [out_dim, in_dim], plus bias or null; fp32.
struct LinearArguments {
    const float* x;
    const float* weight;
    const float* bias;
    float* out;
    std::int64_t tokens, in_dim, out_dim, x_stride;
};

struct KernelTable {
    const char* isa;
    int bf16_tile_rows;  // query rows of a tile of `attend` that suit it where q and rows are bf16
    void (*attend)(Pool&, const AttendArguments&, const AttendTasks&);
    void (*norm)(Pool&, const NormArguments&);
    void (*rope)(Pool&, const RopeArguments&);
    void (*silu_mul)(Pool&, const SiluArguments&);
    void (*add_bias)(Pool&, const BiasArguments&);
    void (*widen)(Pool&, const WidenArguments&);
    void (*linear)(Pool&, const LinearArguments&);
};

// Each returns null where the CPU or the build lacks the ISA.
const KernelTable* plain_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* dot_kernels();
const KernelTable* amx_kernels();  // only if few_rows_supported()

}  // namespace kvtier
