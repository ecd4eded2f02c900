// Compiled with AMX's flags: include nothing here that other files share inline code with.
#include "few_rows.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ahead.hpp"
#include "simd_avx512.hpp"

namespace kvtier {
namespace {

constexpr int TILE_ROWS = 16;    // of weights: 16 columns of the result
constexpr int TILE_DEPTH = 32;   // of the inner dimension
constexpr int TASK_TILES = 8;    // that are read one after the other, each while the one before is computed
constexpr int GROUP_ROWS = 16;   // of x; the weights of a tile are still in a near cache for the next group
constexpr long SYS_REQUEST_PERMISSION = 0x1023, XTILEDATA = 18;

// What the unit is told before its use: register 0 is sums [16, rows], 1 weights [16, 32], 2 x [32, rows].
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    explicit TileConfig(int x_rows) {
        for (int i = 0; i < 3; ++i) {
            rows[i] = TILE_ROWS;
            row_bytes[i] = std::uint16_t(i == 1 ? 2 * TILE_DEPTH : 4 * x_rows);
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

// 16 columns of the result from `column` on, for the rows of a group.
void multiply_tile(const FewRowsArguments& arguments, const Group& group, long column, Ahead& ahead) {
    const long x_bytes = 4 * group.rows, weight_bytes = 2 * arguments.in_dim;
    const bf16* weight = arguments.weight + column * arguments.in_dim;
    _tile_zero(0);
    for (long k = 0; k < arguments.in_dim; k += TILE_DEPTH) {
        _tile_loadd(2, group.packed + k * group.rows, x_bytes);
        _tile_loadd(1, weight + k, weight_bytes);
        _tile_dpbf16ps(0, 1, 2);
        ahead.fetch();
    }
    alignas(64) float sums[TILE_ROWS * GROUP_ROWS], turned[GROUP_ROWS * TILE_ROWS];  // [column, row], [row, column]
    _tile_stored(0, sums, x_bytes);
    const float* from[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; ++i) from[i] = sums + i * group.rows;
    Simd::transpose(from, int(group.rows), turned, TILE_ROWS);
    bf16* out = arguments.out + group.first * arguments.out_dim + column;
    for (long row = 0; row < group.rows; ++row) {
        Simd::store(out + row * arguments.out_dim, Simd::load(turned + row * TILE_ROWS));
    }
}

// Tiles first .. end - 1 of the columns, for all rows.
void multiply_tiles(const FewRowsArguments& arguments, long first, long end) {
    const long tile_values = TILE_ROWS * arguments.in_dim;
    const int steps = int((arguments.rows + GROUP_ROWS - 1) / GROUP_ROWS * (arguments.in_dim / TILE_DEPTH));
    Ahead ahead;
    const auto expect = [&](long tile) {
        ahead.clear();
        if (tile < end) ahead.expect(reinterpret_cast<const char*>(arguments.weight + tile * tile_values), 2 * tile_values);
        ahead.start(steps);
    };
    expect(first);
    ahead.fetch_all();
    long config_rows = 0;
    for (long tile = first; tile < end; ++tile) {
        expect(tile + 1);
        for (long row = 0; row < arguments.rows; row += GROUP_ROWS) {
            const Group group = group_at(arguments, row);
            if (group.rows != config_rows) {
                config_rows = group.rows;
                const TileConfig config{int(config_rows)};
                _tile_loadconfig(&config);
            }
            multiply_tile(arguments, group, tile * TILE_ROWS, ahead);
        }
    }
    _tile_release();
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
        const long first = long(index) * TASK_TILES;
        multiply_tiles(arguments, first, first + TASK_TILES < tiles ? first + TASK_TILES : tiles);
    };
    run_tasks(pool, int((tiles + TASK_TILES - 1) / TASK_TILES), 16, task);
}

}  // namespace kvtier
