// Attention on the matrix unit; the other kernels are those of AVX-512. Compiled with AMX's flags: include nothing here
// that other files share inline code with.
#include "simd_avx512.hpp"

#include "tile.hpp"

#include "matrix_amx.hpp"

#include "attend_bf16.hpp"

namespace kvtier {

const KernelTable* amx_kernels() {
    if (!__builtin_cpu_supports("avx512bf16")) return nullptr;
    static const KernelTable table = table_of<MatrixUnit>("amx");
    return &table;
}

}  // namespace kvtier
