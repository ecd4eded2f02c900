// What every attention kernel needs to know of its tile: who sees what, and where rows lie. Included after tile.hpp.
#pragma once

#include "ahead.hpp"

namespace kvtier {
namespace {

class TileView {
  protected:
    TileView(const AttendArguments& arguments, const AttendTasks& tasks)
        : arguments_(arguments), tasks_(tasks), rows_(arguments.rows), dim_(rows_.dim),
          item_(rows_.type == Type::f32 ? 4 : 2), group_heads_(arguments.heads / rows_.kv_heads) {}

    // `step` spans are computed together and never parted, counted from position 0 on.
    void look_at(const Task& task, int step) {
        tile_ = &tasks_.tiles[task.tile];
        table_ = arguments_.tables + tile_->sequence * arguments_.table_stride;
        rows_count_ = tile_->queries * group_heads_;
        const auto cut = [&](int group) {
            const int span = int(long(spans()) * group / tile_->groups);
            return group == 0 || group == tile_->groups ? span : (tile_->first_span + span) / step * step - tile_->first_span;
        };
        first_span_ = larger(0, cut(task.group));
        end_span_ = larger(0, cut(task.group + 1));
    }

    int spans() const { return tile_->end_span - tile_->first_span; }
    int position_of(int row) const { return tile_->position + row / group_heads_; }
    long token_of(int row) const { return tile_->first_token + row / group_heads_; }
    long head_of(int row) const { return long(tile_->kv_head) * group_heads_ + row % group_heads_; }
    long q_offset(int row) const {
        return token_of(row) * arguments_.q_token_stride + head_of(row) * arguments_.q_head_stride;
    }
    long out_place(int row) const { return token_of(row) * arguments_.heads + head_of(row); }  // of out and lse

    // Memory for the partial results of a span, numbered from the tile's first.
    float* partials_of(int span) const {
        return tasks_.partials + tile_->partial_place + span * partial_floats(rows_count_, dim_);
    }
    // Whether the caller is the last of the tile's tasks, and all partial results are there.
    bool is_last() const { return __atomic_sub_fetch(&tile_->open_groups, 1, __ATOMIC_ACQ_REL) == 0; }

    // First and one past the last of `places` positions from `start` on that the query at `position` sees.
    int visible_end(int position, int start, int places = SPAN) const { return smaller(places, position + 1 - start); }
    int visible_begin(int position, int start) const {
        return arguments_.window ? larger(0, position - arguments_.window + 1 - start) : 0;
    }

    // Calls piece(place, count, keys) for each run of positions start + begin .. start + end - 1 that lies in one block.
    template <class Piece>
    void for_pieces(int start, int begin, int end, const Piece& piece) const {
        for (int place = begin; place < end;) {
            const int block = (start + place) / rows_.block_tokens, offset = (start + place) % rows_.block_tokens;
            const int count = smaller(rows_.block_tokens - offset, end - place);
            const char* plane = reinterpret_cast<const char*>(table_[block]) + rows_.layer_bytes;
            piece(place, count, plane + tile_->kv_head * rows_.head_bytes + long(offset) * dim_ * item_);
            place += count;
        }
    }

    // To be called before each span of the task; `steps` is how often ahead_.fetch() is called for each.
    void look_ahead(int span, int steps) {
        const int next = ((tile_->first_span + span) / Ahead::SPANS + 1) * Ahead::SPANS - tile_->first_span;
        if (span == first_span_) {
            expect_spans(span, next);
            ahead_.fetch_all();
        } else if (span != next - Ahead::SPANS) {
            return;
        }
        expect_spans(next, next + Ahead::SPANS);
        ahead_.start(steps * Ahead::SPANS);
    }

    const AttendArguments& arguments_;
    const AttendTasks& tasks_;
    const Rows& rows_;
    const int dim_, item_, group_heads_;
    Tile* tile_ = nullptr;
    const std::int64_t* table_ = nullptr;
    int rows_count_ = 0;
    int first_span_ = 0, end_span_ = 0;  // of the task, numbered from the tile's first
    Ahead ahead_;

  private:
    void expect_spans(int begin, int end) {
        ahead_.clear();
        const int start = (tile_->first_span + begin) * SPAN, places = (smaller(end, end_span_) - begin) * SPAN;
        const int last = tile_->position + tile_->queries - 1;
        const int seen = visible_end(last, start, places);
        for_pieces(start, visible_begin(tile_->position, start), seen, [&](int, int count, const char* keys) {
            ahead_.expect(keys, long(count) * dim_ * item_);
            ahead_.expect(keys + rows_.value_bytes, long(count) * dim_ * item_);
        });
    }
};

}  // namespace
}  // namespace kvtier
