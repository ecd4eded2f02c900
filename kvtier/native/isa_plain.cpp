// The kernels for one ISA. Compiled with that ISA's flags: include nothing here that other files share inline code with.
#include "simd_plain.hpp"

#include "tile.hpp"

#include "attend.hpp"
#include "elementwise.hpp"
#include "linear.hpp"

namespace kvtier {

const KernelTable* plain_kernels() {
    static constexpr KernelTable table{"plain", CONVERTED_ROWS, attend, norm, rope, silu_mul, add_bias, widen, linear};
    return &table;
}

}  // namespace kvtier
