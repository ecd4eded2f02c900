// Attention on the matrix unit; the other kernels are those of AVX-512. Compiled with AMX's flags: include nothing here
// that other files share inline code with.
#include "simd_avx512.hpp"

#include "tile.hpp"

#include "attend_amx.hpp"

namespace kvtier {

const KernelTable* amx_kernels() {
    if (!__builtin_cpu_supports("avx512bf16")) return nullptr;
    static const KernelTable table{"amx", UnitTask::TILE_QUERY_ROWS, attend, avx512_kernels()->norm, avx512_kernels()->rope,
                                   avx512_kernels()->silu_mul, avx512_kernels()->add_bias, avx512_kernels()->widen,
                                   avx512_kernels()->linear};
    return &table;
}

}  // namespace kvtier
