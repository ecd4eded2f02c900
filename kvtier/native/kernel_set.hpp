// One set of kernels, the threads they run on, and what has to be chosen or made for a call: module.cpp and layers.cpp
// ask for operations, and know neither tables nor pools.
//
// One call at a time. Throws std::runtime_error in a forked child.
#pragma once

#include <string>
#include <vector>

#include "few_rows.hpp"
#include "kernels.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "reading.hpp"

namespace kvtier {

// What this CPU and this build can run, best first.
std::vector<std::string> supported_isas();

// out [rows, out_dim] = x [rows, in_dim] times the transpose of weight [out_dim, in_dim].
struct FewRowsProduct {
    const bf16* x;
    const bf16* weight;
    bf16* out;
    std::int64_t rows, in_dim, out_dim, x_stride;
};

class KernelSet {
  public:
    // Throws std::invalid_argument for an isa that this CPU lacks.
    KernelSet(int threads, const std::string& isa);

    const char* isa() const { return table_.isa; }
    int threads() const { return pool_.threads(); }
    int few_rows_max() const { return few_rows_.rows_max; }
    // Whether multiply_few() takes such matrices, if it takes any rows.
    static bool takes_few(std::int64_t in_dim, std::int64_t out_dim) {
        return in_dim > 0 && in_dim % 32 == 0 && out_dim % 16 == 0;
    }

    void append(const AppendArguments& arguments) const;
    // Serves every call that has the same queries, lengths and window.
    Plan plan(const AttendArguments& arguments) const;
    void attend(const AttendArguments& arguments, Plan& plan) { table_.attend(pool_, arguments, plan.view()); }
    void norm(const NormArguments& arguments) { table_.norm(pool_, arguments); }
    void rope(const RopeArguments& arguments) { table_.rope(pool_, arguments); }
    void silu_mul(const SiluArguments& arguments) { table_.silu_mul(pool_, arguments); }
    void add_bias(const BiasArguments& arguments) { table_.add_bias(pool_, arguments); }
    void widen(const WidenArguments& arguments) { table_.widen(pool_, arguments); }
    void multiply(const LinearArguments& arguments) { table_.linear(pool_, arguments); }
    // Throws std::invalid_argument for other than 1 to few_rows_max() rows and for what takes_few() refuses.
    void multiply_few(const FewRowsProduct& product);
    std::uint64_t read(const std::uint64_t* memory, std::size_t bytes) { return read_memory(pool_, memory, bytes); }

  private:
    struct alignas(64) Line {
        bf16 values[32];
    };

    const KernelTable& table_;
    const FewRows few_rows_;
    Pool pool_;
    std::vector<Line> packed_;
};

}  // namespace kvtier
