// Attention with dot products of bf16; the other kernels are those of AVX-512. Compiled with AVX512_BF16's flags: include
// nothing here that other files share inline code with.
#include "simd_avx512.hpp"

#include "tile.hpp"

#include "matrix_dot.hpp"

#include "attend_bf16.hpp"

namespace kvtier {

const KernelTable* dot_kernels() {
    if (!avx512_kernels() || !__builtin_cpu_supports("avx512bf16")) return nullptr;
    static const KernelTable table = table_of<DotUnit>("avx512_bf16");
    return &table;
}

}  // namespace kvtier
