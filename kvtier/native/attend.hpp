// Paged attention of one tile of queries over spans of 64 positions. Included by isa_*.cpp after tile.hpp.
//
// The partial result of a (query, span) is always computed from zero, in the same order, and folded left to right:
// bits depend neither on the tile nor on the thread. Positions that no query of the tile sees are not read.
#pragma once

#include <cmath>
#include <type_traits>

#include "ahead.hpp"

namespace kvtier {
namespace {

// Result of some rows over one span or several: acc = sum of e^(score - top) v, total = sum of e^(score - top).
// A row that sees nothing has total 0.
struct Partial {
    float* acc;  // [row, stride]
    float* top;
    float* total;
    long stride, step;  // from row to row of acc, and of top and total
    Partial at(long row) const { return {acc + row * stride, top + row * step, total + row * step, stride, step}; }
};

template <class T, class Unit>
class TileTask {
    static constexpr bool ON_UNIT = Unit::PRESENT && std::is_same<T, bf16>::value;
    static constexpr int BLOCK_ROWS = 16;  // rows computed together at most

  public:
    TileTask(const AttendArguments& arguments, const AttendTasks& tasks, float* scratch)
        : arguments_(arguments), tasks_(tasks), rows_(arguments.rows), dim_(rows_.dim), width_(padded(dim_)),
          group_heads_(arguments.heads / rows_.kv_heads) {
        const auto take = [&](long floats) {
            float* start = scratch;
            scratch += (floats + 15) / 16 * 16;
            return start;
        };
        q_ = take(long(tasks.tile_rows_max) * width_);
        state_ = {take(long(tasks.tile_rows_max) * width_), take(tasks.tile_rows_max), take(tasks.tile_rows_max), width_, 1};
        keys_ = take(long(width_) * SPAN);
        values_ = take(long(width_) * SPAN);
        zeros_ = take(width_);
        scores_ = take(padded(tasks.tile_rows_max) * SPAN);
        span_ = {take(BLOCK_ROWS * width_), take(tasks.tile_rows_max), take(tasks.tile_rows_max), width_, 1};
        for (int i = 0; i < width_; ++i) zeros_[i] = 0.0f;
        if constexpr (ON_UNIT) unit_.place(take(0), dim_, tasks.tile_rows_max);
    }

    static long scratch_floats(const AttendArguments& arguments, const AttendTasks& tasks) {
        const long width = padded(arguments.rows.dim), rows = tasks.tile_rows_max;
        const long own = 2 * rows * width + 4 * (rows + 16) + (2 * SPAN + 1 + BLOCK_ROWS) * width +
                         padded(int(rows)) * SPAN + 8 * 16;
        if constexpr (ON_UNIT) return own + Unit::scratch_floats(arguments.rows.dim, tasks.tile_rows_max);
        return own;
    }

    void run(Task task) {
        tile_ = &tasks_.tiles[task.tile];
        table_ = arguments_.tables + tile_->sequence * arguments_.table_stride;
        rows_count_ = tile_->queries * group_heads_;
        if constexpr (ON_UNIT) {
            if (arguments_.q_type == Type::bf16 && rows_count_ > TILE_ROWS) {
                const typename Unit::Claim claim;
                use_unit_ = true;
                return run_spans(task);
            }
        }
        run_spans(task);
    }

  private:
    void run_spans(Task task) {
        load_queries();
        const int spans = tile_->end_span - tile_->first_span;
        if (tile_->groups == 1) {
            clear(state_);
            for (int span = 0; span < spans; ++span) attend_span(span, nullptr);
            write_result();
            return;
        }
        const int begin = int(long(spans) * task.group / tile_->groups);
        const int end = int(long(spans) * (task.group + 1) / tile_->groups);
        for (int span = begin; span < end; ++span) {
            const Partial partial = stored(long(span) * rows_count_);
            attend_span(span, &partial);
        }
        if (__atomic_sub_fetch(&tile_->open_groups, 1, __ATOMIC_ACQ_REL) == 0) {  // the last one folds all, in order
            clear(state_);
            for (int span = 0; span < spans; ++span) {
                for (int row = 0; row < rows_count_; row += BLOCK_ROWS) {
                    fold(stored(long(span) * rows_count_ + row), row, smaller(BLOCK_ROWS, rows_count_ - row));
                }
            }
            write_result();
        }
    }

    Partial stored(long row) const {
        float* start = tasks_.partials + (tile_->partial_row + row) * (width_ + 2);
        return {start, start + width_, start + width_ + 1, width_ + 2, width_ + 2};
    }

    void clear(const Partial& partial) const {
        for (int row = 0; row < rows_count_; ++row) {
            const Partial one = partial.at(row);
            for (int i = 0; i < width_; ++i) one.acc[i] = 0.0f;
            *one.top = -INFINITY;
            *one.total = 0.0f;
        }
    }

    // q times scale as fp32 [query, head of the group, dim padded with zeros].
    void load_queries() {
        for (int row = 0; row < rows_count_; ++row) {
            const long token = tile_->first_token + row / group_heads_;
            const long head = long(tile_->kv_head) * group_heads_ + row % group_heads_;
            const long from = token * arguments_.q_token_stride + head * arguments_.q_head_stride;
            float* to = q_ + long(row) * width_;
            switch (arguments_.q_type) {
                case Type::f32: scale_row(static_cast<const float*>(arguments_.q) + from, to); break;
                case Type::bf16:
                    scale_row(static_cast<const bf16*>(arguments_.q) + from, to);
                    if constexpr (ON_UNIT) unit_.load_query(row, static_cast<const bf16*>(arguments_.q) + from);
                    break;
                case Type::f16: scale_row(static_cast<const f16*>(arguments_.q) + from, to); break;
            }
        }
    }
    template <class Q>
    void scale_row(const Q* from, float* to) const {
        for (int i = 0; i < width_; i += LANES) {
            const Floats x = Simd::load(from + i, larger(0, smaller(LANES, dim_ - i)));
            Simd::store(to + i, Simd::mul(x, Simd::set(arguments_.scale)));
        }
    }

    // First and one past the last place within the span at `start` that the query at `position` sees.
    int visible_end(int position, int start) const { return smaller(SPAN, position + 1 - start); }
    int visible_begin(int position, int start) const {
        return arguments_.window ? larger(0, position - arguments_.window + 1 - start) : 0;
    }

    // The span's partial results go to *to or, if that is null, are folded into state_.
    void attend_span(int span, const Partial* to) {
        const int start = (tile_->first_span + span) * SPAN, last = tile_->position + tile_->queries - 1;
        const int begin = visible_begin(tile_->position, start), end = visible_end(last, start);
        find_rows(start, begin, end);
        expect_rows(start + SPAN);
        if constexpr (ON_UNIT) {
            const bool all_see_all = visible_begin(last, start) == 0 && visible_end(tile_->position, start) == SPAN;
            if (use_unit_ && all_see_all) return attend_span_on_unit(to);
        }
        for (int i = begin / LANES * LANES; i < end; i += LANES) {
            Simd::transpose(key_rows_ + i, dim_, keys_ + i, SPAN);
            if (i % 16 == 0) ahead_.fetch();
        }
        const bool widen = rows_count_ > TILE_ROWS || dim_ % LANES != 0;
        if (widen) widen_values(begin, end);
        for (int row = 0; row < rows_count_; row += TILE_ROWS) {
            const int count = smaller(TILE_ROWS, rows_count_ - row);
            const Partial partial = to ? to->at(row) : span_;
            weigh(row, count, start, partial);
            if (widen) {
                add_values(row, count, start, partial, [this](int k, int column) { return values_ + k * width_ + column; });
            } else {
                add_values(row, count, start, partial, [this](int k, int column) { return value_rows_[k] + column; });
            }
            if (!to) fold(partial, row, count);
        }
    }

    // Each step for all rows before the next: the unit would wait for what was stored just before.
    void attend_span_on_unit(const Partial* to) {
        unit_.load_span(key_rows_, value_rows_);
        const Floats scale = Simd::set(arguments_.scale);
        const auto block = [&](int row) {
            return Partial{span_.acc, span_.top + row, span_.total + row, span_.stride, span_.step};
        };
        for (int row = 0; row < rows_count_; row += BLOCK_ROWS) {
            unit_.score(row, scores_ + row * SPAN);
            ahead_.fetch();
        }
        for (int row = 0; row < rows_count_; row += BLOCK_ROWS) {
            const int count = smaller(BLOCK_ROWS, rows_count_ - row);
            float* scores = scores_ + row * SPAN;
            for (int i = 0; i < count * SPAN; i += LANES) {
                Simd::store(scores + i, Simd::mul(Simd::load(scores + i), scale));
            }
            for (int i = 0; i < count; ++i) weigh_row(scores + i * SPAN, 0, SPAN, block(row).at(i));
            unit_.take_weights(row, scores);
        }
        for (int row = 0; row < rows_count_; row += BLOCK_ROWS) {
            const int count = smaller(BLOCK_ROWS, rows_count_ - row);
            unit_.add_values(row, span_.acc, span_.stride);
            ahead_.fetch();
            if (to) copy(block(row), to->at(row), count);
            else fold(block(row), row, count);
        }
    }

    void copy(const Partial& from, const Partial& to, int count) const {
        for (int row = 0; row < count; ++row) {
            const Partial source = from.at(row), target = to.at(row);
            for (int i = 0; i < width_; i += LANES) Simd::store(target.acc + i, Simd::load(source.acc + i));
            *target.top = *source.top;
            *target.total = *source.total;
        }
    }

    // Calls piece(place, count, keys) for each run of places begin .. end - 1 of the span that lies in one block.
    template <class Piece>
    void for_pieces(int start, int begin, int end, const Piece& piece) const {
        for (int place = begin; place < end;) {
            const int block = (start + place) / rows_.block_tokens, offset = (start + place) % rows_.block_tokens;
            const int count = smaller(rows_.block_tokens - offset, end - place);
            const char* plane = reinterpret_cast<const char*>(table_[block]) + rows_.layer_bytes;
            piece(place, count, plane + tile_->kv_head * rows_.head_bytes + long(offset) * dim_ * long(sizeof(T)));
            place += count;
        }
    }

    // Addresses of K and V at places begin .. end - 1 of the span at `start`; elsewhere K is zeros and V unset.
    void find_rows(int start, int begin, int end) {
        for (int place = 0; place < begin; ++place) key_rows_[place] = reinterpret_cast<const T*>(zeros_);
        for (int place = end; place < SPAN; ++place) key_rows_[place] = reinterpret_cast<const T*>(zeros_);
        for_pieces(start, begin, end, [&](int place, int count, const char* keys) {
            for (int i = 0; i < count; ++i) {
                key_rows_[place + i] = reinterpret_cast<const T*>(keys) + long(i) * dim_;
                value_rows_[place + i] = reinterpret_cast<const T*>(keys + rows_.value_bytes) + long(i) * dim_;
            }
        });
    }

    void expect_rows(int start) {
        ahead_.clear();
        const int end = smaller(SPAN, tile_->position + tile_->queries - start);
        for_pieces(start, 0, end, [&](int, int count, const char* keys) {
            const long bytes = long(count) * dim_ * long(sizeof(T));
            ahead_.expect(keys, bytes);
            ahead_.expect(keys + rows_.value_bytes, bytes);
        });
    }

    void widen_values(int begin, int end) {
        for (int place = begin; place < end; ++place) {
            for (int i = 0; i < width_; i += LANES) {
                const Floats x = Simd::load(value_rows_[place] + i, larger(0, smaller(LANES, dim_ - i)));
                Simd::store(values_ + place * width_ + i, x);
            }
        }
    }

    // multiply() in steps, if there is little work for what has to be read; the order of sums is the same.
    template <class B>
    void multiply_ahead(int rows, const float* a, long a_stride, const B& b, int begin, int end, float* c, long c_stride,
                        int columns) {
        const int step = rows_count_ > TILE_ROWS ? larger(SPAN, dim_) : 16;
        for (int k = begin; k < end; k += step) {
            multiply(rows, a, a_stride, b, k, smaller(k + step, end), c, c_stride, columns);
            ahead_.fetch();
        }
    }

    // scores_ of `count` rows from `row` on, turned into weights e^(score - top); fills top and total of `to`.
    void weigh(int row, int count, int start, const Partial& to) {
        const int first = tile_->position + row / group_heads_, last = tile_->position + (row + count - 1) / group_heads_;
        const int begin = visible_begin(first, start) / LANES * LANES;
        const int end = smaller(SPAN, (larger(0, visible_end(last, start)) + LANES - 1) / LANES * LANES);
        for (int i = 0; i < count * SPAN; i += LANES) Simd::store(scores_ + i, Simd::set(0.0f));
        if (begin < end) {
            const auto keys = [&](int k, int column) { return keys_ + k * SPAN + begin + column; };
            multiply_ahead(count, q_ + long(row) * width_, width_, keys, 0, dim_, scores_ + begin, SPAN, end - begin);
        }
        for (int i = 0; i < count; ++i) {
            const int position = tile_->position + (row + i) / group_heads_;
            weigh_row(scores_ + i * SPAN, visible_begin(position, start), visible_end(position, start), to.at(i));
        }
    }

    void weigh_row(float* scores, int begin, int end, const Partial& to) const {
        if (begin >= end) {
            *to.top = -INFINITY;
            *to.total = 0.0f;
            return;
        }
        for (int i = 0; i < begin; ++i) scores[i] = -INFINITY;
        for (int i = end; i < SPAN; ++i) scores[i] = -INFINITY;
        Floats top = Simd::load(scores);
        for (int i = LANES; i < SPAN; i += LANES) top = Simd::max(top, Simd::load(scores + i));
        *to.top = Simd::largest(top);
        top = Simd::set(*to.top);
        Floats total = Simd::set(0.0f);
        for (int i = 0; i < SPAN; i += LANES) {
            const Floats weight = exp(Simd::sub(Simd::load(scores + i), top));
            Simd::store(scores + i, weight);
            total = Simd::add(total, weight);
        }
        *to.total = Simd::sum(total);
    }

    // acc of `to` = weights times V, each row over exactly the places it sees: 0 times what lies elsewhere may be NaN.
    template <class Values>
    void add_values(int row, int count, int start, const Partial& to, const Values& values) {
        int common_begin = 0, common_end = SPAN;
        for (int i = 0; i < count; ++i) {
            const int position = tile_->position + (row + i) / group_heads_;
            common_begin = larger(common_begin, visible_begin(position, start));
            common_end = smaller(common_end, visible_end(position, start));
            for (int column = 0; column < width_; column += LANES) {
                Simd::store(to.at(i).acc + column, Simd::set(0.0f));
            }
        }
        const auto add = [&](int i, int rows, int begin, int end) {
            multiply_ahead(rows, scores_ + i * SPAN, SPAN, values, begin, end, to.at(i).acc, to.stride, width_);
        };
        const auto each = [&](int begin, int end) {
            for (int i = 0; i < count; ++i) {
                const int position = tile_->position + (row + i) / group_heads_;
                add(i, 1, larger(begin, visible_begin(position, start)), smaller(end, visible_end(position, start)));
            }
        };
        if (common_begin >= common_end) return each(0, SPAN);
        each(0, common_begin);
        add(0, count, common_begin, common_end);
        each(common_end, SPAN);
    }

    // Folds the partial results of `count` rows, up to BLOCK_ROWS, into state_ from `row` on.
    void fold(const Partial& from, int row, int count) const {
        alignas(64) float tops[BLOCK_ROWS] = {}, old_scales[BLOCK_ROWS] = {}, new_scales[BLOCK_ROWS] = {};
        for (int i = 0; i < count; ++i) {
            const float old_top = *state_.at(row + i).top, new_top = *from.at(i).top;
            tops[i] = old_top > new_top ? old_top : new_top;
            old_scales[i] = old_top - tops[i];
            new_scales[i] = new_top - tops[i];
        }
        for (int i = 0; i < count; i += LANES) {
            Simd::store(old_scales + i, exp(Simd::load(old_scales + i)));
            Simd::store(new_scales + i, exp(Simd::load(new_scales + i)));
        }
        for (int i = 0; i < count; ++i) {
            const Partial one = from.at(i), to = state_.at(row + i);
            if (*one.total == 0.0f) continue;  // sees nothing of it
            const Floats old_scale = Simd::set(old_scales[i]), new_scale = Simd::set(new_scales[i]);
            const auto merge = [&](Floats old_part, Floats new_part) {
                return Simd::fma(new_part, new_scale, Simd::mul(old_part, old_scale));
            };
            for (int j = 0; j < width_; j += LANES) {
                Simd::store(to.acc + j, merge(Simd::load(to.acc + j), Simd::load(one.acc + j)));
            }
            *to.total = Simd::first(merge(Simd::set(*to.total), Simd::set(*one.total)));
            *to.top = tops[i];
        }
    }

    void write_result() const {
        for (int row = 0; row < rows_count_; ++row) {
            const long token = tile_->first_token + row / group_heads_;
            const long head = long(tile_->kv_head) * group_heads_ + row % group_heads_;
            const long place = token * arguments_.heads + head;
            const Partial from = state_.at(row);
            switch (arguments_.q_type) {
                case Type::f32: divide_row(from, static_cast<float*>(arguments_.out) + place * dim_); break;
                case Type::bf16: divide_row(from, static_cast<bf16*>(arguments_.out) + place * dim_); break;
                case Type::f16: divide_row(from, static_cast<f16*>(arguments_.out) + place * dim_); break;
            }
            arguments_.lse[place] = *from.top + logf(*from.total);
        }
    }
    template <class Q>
    void divide_row(const Partial& from, Q* to) const {
        for (int i = 0; i < dim_; i += LANES) {
            const Floats x = Simd::div(Simd::load(from.acc + i), Simd::set(*from.total));
            Simd::store(to + i, x, smaller(LANES, dim_ - i));
        }
    }

    const AttendArguments& arguments_;
    const AttendTasks& tasks_;
    const Rows& rows_;
    const int dim_, width_, group_heads_;
    Tile* tile_ = nullptr;
    int rows_count_ = 0;
    bool use_unit_ = false;
    Unit unit_;
    const std::int64_t* table_ = nullptr;
    float *q_, *keys_, *values_, *zeros_, *scores_;
    Partial state_, span_;  // of the tile so far, and of a block of its rows over the current span
    Ahead ahead_;
    const T* key_rows_[SPAN];
    const T* value_rows_[SPAN];
};

template <class T>
void attend_rows(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    const auto body = [&](int task, float* scratch) {
        TileTask<T, MatrixUnit>(arguments, tasks, scratch).run(tasks.tasks[task]);
    };
    run_tasks(pool, tasks.count, TileTask<T, MatrixUnit>::scratch_floats(arguments, tasks), body);
}

void attend(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    switch (arguments.rows.type) {
        case Type::f32: return attend_rows<float>(pool, arguments, tasks);
        case Type::bf16: return attend_rows<bf16>(pool, arguments, tasks);
        case Type::f16: return attend_rows<f16>(pool, arguments, tasks);
    }
}

}  // namespace
}  // namespace kvtier
