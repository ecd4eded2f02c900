#include "plan.hpp"

#include <algorithm>

namespace kvtier {
namespace {

constexpr int TASKS_PER_THREAD = 4;                 // enough that threads finish together
constexpr std::int64_t PARTIAL_FLOATS = 16L << 20;  // 64 MiB; what would need more is not cut over spans

std::int64_t spans(const Tile& tile) { return tile.end_span - tile.first_span; }

}  // namespace

Plan::Plan(const AttendArguments& arguments, int tile_rows, int threads) {
    cut_queries(arguments, tile_rows);
    cut_spans(arguments, threads);
}

AttendTasks Plan::view() {
    for (Tile& tile : tiles_) tile.open_groups = tile.groups;
    return {tiles_.data(), tasks_.data(), int(tasks_.size()), tile_rows_max_, partials_.get()};
}

void Plan::cut_queries(const AttendArguments& arguments, int tile_rows) {
    const int group_heads = arguments.heads / arguments.rows.kv_heads;
    const int tile_queries = std::max(1, tile_rows / group_heads);
    for (int sequence = 0; sequence < arguments.sequences; ++sequence) {
        const int end = arguments.query_starts[sequence + 1];
        for (int token = arguments.query_starts[sequence]; token < end; token += tile_queries) {
            Tile tile{};
            tile.sequence = sequence;
            tile.first_token = token;
            tile.queries = std::min(tile_queries, end - token);
            tile.position = arguments.lengths[sequence] - end + token;
            const int first_key = arguments.window ? std::max(0, tile.position - arguments.window + 1) : 0;
            tile.first_span = first_key / SPAN;
            tile.end_span = (tile.position + tile.queries - 1) / SPAN + 1;
            tile_rows_max_ = std::max(tile_rows_max_, tile.queries * group_heads);
            for (tile.kv_head = 0; tile.kv_head < arguments.rows.kv_heads; ++tile.kv_head) tiles_.push_back(tile);
        }
    }
    // Much work first, so that no thread starts a long tile when the others are done.
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& left, const Tile& right) {
        return spans(left) * left.queries > spans(right) * right.queries;
    });
}

void Plan::cut_spans(const AttendArguments& arguments, int threads) {
    const int group_heads = arguments.heads / arguments.rows.kv_heads;
    const int wanted = threads > 1 ? threads * TASKS_PER_THREAD : 1;
    const int tiles = int(tiles_.size());
    std::int64_t partials = 0;
    for (int index = 0; index < tiles; ++index) {
        Tile& tile = tiles_[index];
        tile.groups = 1;
        const std::int64_t floats = spans(tile) * partial_floats(tile.queries * group_heads, arguments.rows.dim);
        if (tiles < wanted && spans(tile) > 1 && partials + floats <= PARTIAL_FLOATS) {
            tile.groups = int(std::min<std::int64_t>(spans(tile), (wanted - 1) / tiles + 1));
            tile.partial_place = partials;
            partials += floats;
        }
        for (int group = 0; group < tile.groups; ++group) tasks_.push_back({index, group});
    }
    if (partials > 0) partials_.reset(new float[std::size_t(partials)]);
}

}  // namespace kvtier
