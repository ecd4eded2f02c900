// Compiled with AMX's flags: include nothing here that other files share inline code with.
#include "few_rows.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd_avx512.hpp"

namespace kvtier {
namespace {

constexpr int TILE_ROWS = 16;    // of weights: 16 columns of the result
constexpr int TILE_DEPTH = 32;   // of the inner dimension
constexpr int TASK_TILES = 4;    // tiles of weights side by side, each with its own sums in registers
constexpr int GROUP_ROWS = 16;   // of x; the weights of a task are still in the L2 cache for the next group
constexpr long SYS_REQUEST_PERMISSION = 0x1023, XTILEDATA = 18;

// What the unit is told before its use: registers 0 to 3 are sums [16, rows], 4 and 5 weights [16, 32], 6 x [32, rows].
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    explicit TileConfig(int x_rows) {
        for (int i = 0; i < 7; ++i) {
            rows[i] = TILE_ROWS;
            row_bytes[i] = std::uint16_t(i == 4 || i == 5 ? 2 * TILE_DEPTH : 4 * x_rows);
        }
    }
};

// Up to GROUP_ROWS rows of x and where they lie in `packed`.
struct Group {
    long first, rows;
    bf16* packed;  // [in_dim / 2, rows, 2]: pairs of the inner dimension lie together, as the unit wants its right side
};

Group group_at(const FewRowsArguments& arguments, long first) {
    const long rows = arguments.rows - first < GROUP_ROWS ? arguments.rows - first : GROUP_ROWS;
    return {first, rows, arguments.packed + first * arguments.in_dim};
}

void pack(const FewRowsArguments& arguments, const Group& group) {
    auto* packed = reinterpret_cast<std::uint32_t*>(group.packed);
    for (long row = 0; row < group.rows; ++row) {
        const char* x = reinterpret_cast<const char*>(arguments.x + (group.first + row) * arguments.x_stride);
        for (long pair = 0; pair < arguments.in_dim / 2; ++pair) {
            __builtin_memcpy(packed + pair * group.rows + row, x + 4 * pair, 4);
        }
    }
}

// 16 * TILES columns of the result from `column` on, for the rows of a group.
template <int TILES>
void multiply_tiles(const FewRowsArguments& arguments, const Group& group, long column) {
    const long x_bytes = 4 * group.rows, weight_bytes = 2 * arguments.in_dim;
    const bf16* weight = arguments.weight + column * arguments.in_dim;
    const long tile = TILE_ROWS * arguments.in_dim;
    _tile_zero(0);
    if constexpr (TILES > 1) _tile_zero(1);
    if constexpr (TILES > 2) _tile_zero(2);
    if constexpr (TILES > 3) _tile_zero(3);
    for (long k = 0; k < arguments.in_dim; k += TILE_DEPTH) {
        _tile_loadd(6, group.packed + k * group.rows, x_bytes);
        _tile_loadd(4, weight + k, weight_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TILES > 1) {
            _tile_loadd(5, weight + tile + k, weight_bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (TILES > 2) {
            _tile_loadd(4, weight + 2 * tile + k, weight_bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (TILES > 3) {
            _tile_loadd(5, weight + 3 * tile + k, weight_bytes);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    alignas(64) float sums[TILES][TILE_ROWS * GROUP_ROWS];  // each [16 columns, rows]
    _tile_stored(0, sums[0], x_bytes);
    if constexpr (TILES > 1) _tile_stored(1, sums[1], x_bytes);
    if constexpr (TILES > 2) _tile_stored(2, sums[2], x_bytes);
    if constexpr (TILES > 3) _tile_stored(3, sums[3], x_bytes);
    for (int i = 0; i < TILES; ++i) {
        const float* from[TILE_ROWS];
        alignas(64) float turned[GROUP_ROWS * TILE_ROWS];
        for (int j = 0; j < TILE_ROWS; ++j) from[j] = sums[i] + j * group.rows;
        Simd::transpose(from, int(group.rows), turned, TILE_ROWS);
        bf16* out = arguments.out + group.first * arguments.out_dim + column + i * TILE_ROWS;
        for (long row = 0; row < group.rows; ++row) {
            Simd::store(out + row * arguments.out_dim, Simd::load(turned + row * TILE_ROWS));
        }
    }
}

}  // namespace

bool few_rows_supported() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool unit = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    return unit && avx512_kernels() && syscall(SYS_arch_prctl, SYS_REQUEST_PERMISSION, XTILEDATA) == 0;
}

void few_rows(Pool& pool, const FewRowsArguments& arguments) {
    for (long row = 0; row < arguments.rows; row += GROUP_ROWS) pack(arguments, group_at(arguments, row));
    const long tiles = arguments.out_dim / TILE_ROWS;
    const auto task = [&](int index, float*) {
        const long first = long(index) * TASK_TILES, column = first * TILE_ROWS;
        for (long row = 0; row < arguments.rows; row += GROUP_ROWS) {
            const Group group = group_at(arguments, row);
            const TileConfig config(int(group.rows));
            _tile_loadconfig(&config);
            switch (tiles - first) {
                case 1: multiply_tiles<1>(arguments, group, column); break;
                case 2: multiply_tiles<2>(arguments, group, column); break;
                case 3: multiply_tiles<3>(arguments, group, column); break;
                default: multiply_tiles<4>(arguments, group, column);
            }
        }
        _tile_release();
    };
    run_tasks(pool, int((tiles + TASK_TILES - 1) / TASK_TILES), 16, task);
}

}  // namespace kvtier
