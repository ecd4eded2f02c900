// A run of a decoder's layers in one call: the kernels of one set, one after the other, as kvtier/models/decoder.py
// calls them, so with the same bits.
//
// Owns the memory between the kernels. Weights, rows and the tensors of a pass are the caller's, who vouches for their
// shapes. One call at a time for each set of kernels.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernel_set.hpp"

namespace kvtier {

// A linear map: weight [out, in], bias [out] or null.
struct Matrix {
    const void* weight;
    const void* bias;
};

// One layer's addresses. Without norms of q and k those are null. `next_norm` is the next layer's input norm, or the
// last one of the model. Window 0: none.
struct LayerWeights {
    Matrix qkv, output, gate_up, down;
    const void *q_norm, *k_norm, *post_norm, *next_norm;
    int window;
};

// Of all layers. `rows` is layer 0's slice; `slice_bytes` leads from one layer's to the next one's. Weights, tensors and
// rows are of rows.type.
struct LayerShape {
    Rows rows;
    std::int64_t slice_bytes;
    int heads;
    std::int64_t hidden, intermediate;
    float eps, scale;
};

// A pass: residual and normed [token, hidden], changed in place; cos and sin [token, dim / 2]; the rest as in
// AttentionBatch of kvtier/attention/base.py.
struct Pass {
    int tokens, sequences;
    void* residual;
    void* normed;
    const float* cos;
    const float* sin;
    const std::int64_t* tables;
    std::int64_t table_stride;
    const std::int32_t* query_starts;
    const std::int32_t* lengths;
    const std::int64_t* append_rows;
    const std::int32_t* append_offsets;
};

class Layers {
  public:
    // Throws std::invalid_argument for what no decoder has.
    Layers(KernelSet& kernels, const LayerShape& shape, std::vector<LayerWeights> layers);

    // Tokens of the largest pass; 0: no pass of this type and shape can be run by these kernels alone.
    int rows_max() const { return rows_max_; }

    // Layers first .. end - 1. Throws std::invalid_argument, before anything is written, for layers that are not there, for
    // other than 1 to rows_max() tokens and for sequences whose tokens are not those of the pass.
    void run(const Pass& pass, int first, int end);

  private:
    // Some heads of all tokens, head beside head.
    struct Heads {
        char* data;
        std::int64_t count, token_stride;
    };
    struct Free {
        void operator()(char* memory) const;
    };
    using Buffer = std::unique_ptr<char[], Free>;

    Buffer buffer(std::int64_t row_elements, std::size_t item_bytes) const;
    void run_layer(const Pass& pass, const LayerWeights& layer, AttendArguments& attention, Plan& plan);
    AttendArguments attention_of(const Pass& pass) const;
    void multiply(const void* x, std::int64_t in_dim, const Matrix& matrix, void* out, std::int64_t out_dim, int tokens);
    Heads norm_heads(const Heads& heads, const void* weight, void* out, int tokens);
    void rotate(const Heads& heads, const Pass& pass);
    void add_norm(const Pass& pass, const void* weight);

    KernelSet& kernels_;
    const LayerShape shape_;
    const std::vector<LayerWeights> layers_;
    const std::size_t item_bytes_;
    const int rows_max_;
    Buffer qkv_, q_, k_, attended_, lse_, update_, gate_up_, gated_;
};

}  // namespace kvtier
