// The kernels for one ISA. Compiled with that ISA's flags: include nothing here that other files share inline code with.
#include "simd_avx2.hpp"

#include "tile.hpp"

#include "attend.hpp"
#include "elementwise.hpp"
#include "linear.hpp"

namespace kvtier {

const KernelTable* avx2_kernels() {  // a CPU with these two also converts fp16
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return nullptr;
    static constexpr KernelTable table{"avx2", CONVERTED_ROWS, attend, norm, rope, silu_mul, add_bias, widen, linear};
    return &table;
}

}  // namespace kvtier
