// The kernels for one ISA. Compiled with that ISA's flags: include nothing here that other files share inline code with.
#include "simd_avx512.hpp"

#include "tile.hpp"

#include "attend.hpp"
#include "elementwise.hpp"
#include "linear.hpp"

namespace kvtier {

const KernelTable* avx512_kernels() {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return nullptr;
    }
    static constexpr KernelTable table{"avx512", CONVERTED_ROWS, attend, norm, rope, silu_mul, add_bias, widen, linear};
    return &table;
}

}  // namespace kvtier
