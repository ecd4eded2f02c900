// Paged attention of one tile of queries over spans of 64 positions. Included by isa_*.cpp after tile.hpp.
//
// The partial result of a (query, span) is always computed from zero, in the same order, and folded left to right:
// bits depend neither on the tile nor on the thread. Positions that no query of the tile sees are not read.
#pragma once

#include <cmath>

#include "tile_view.hpp"

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

template <class T>
class TileTask : TileView {
    static constexpr int BLOCK_ROWS = 16;  // rows folded together at most
    static constexpr int FETCHES = 12;     // of ahead_ for a span with few rows

  public:
    TileTask(const AttendArguments& arguments, const AttendTasks& tasks, float* scratch)
        : TileView(arguments, tasks), width_(padded(dim_)) {
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
        scores_ = take(TILE_ROWS * SPAN);
        span_ = {take(TILE_ROWS * width_), take(TILE_ROWS), take(TILE_ROWS), width_, 1};
        for (int i = 0; i < width_; ++i) zeros_[i] = 0.0f;
    }

    static long scratch_floats(const AttendArguments& arguments, const AttendTasks& tasks) {
        const long width = padded(arguments.rows.dim), rows = tasks.tile_rows_max;
        return 2 * rows * width + 2 * (rows + 16) + (2 * SPAN + 1 + TILE_ROWS) * width + TILE_ROWS * SPAN + 10 * 16;
    }

    void run(const Task& task) {
        look_at(task, 1);
        load_queries();
        if (tile_->groups == 1) clear(state_);
        for (int span = first_span_; span < end_span_; ++span) {
            look_ahead(span, FETCHES);
            const Partial partial = stored(span);
            attend_span(span, tile_->groups == 1 ? nullptr : &partial);
        }
        if (tile_->groups > 1) {
            if (!is_last()) return;
            clear(state_);
            for (int span = 0; span < spans(); ++span) {
                for (int row = 0; row < rows_count_; row += BLOCK_ROWS) {
                    fold(stored(span).at(row), row, smaller(BLOCK_ROWS, rows_count_ - row));
                }
            }
        }
        write_result();
    }

  private:
    Partial stored(int span) const {
        float* start = partials_of(span);
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
            const long from = q_offset(row);
            float* to = q_ + long(row) * width_;
            switch (arguments_.q_type) {
                case Type::f32: scale_row(static_cast<const float*>(arguments_.q) + from, to); break;
                case Type::bf16: scale_row(static_cast<const bf16*>(arguments_.q) + from, to); break;
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

    // The span's partial results go to *to or, if that is null, are folded into state_.
    void attend_span(int span, const Partial* to) {
        const int start = (tile_->first_span + span) * SPAN, last = tile_->position + tile_->queries - 1;
        const int begin = visible_begin(tile_->position, start), end = visible_end(last, start);
        find_rows(start, begin, end);
        for (int i = begin / LANES * LANES; i < end; i += LANES) {
            Simd::transpose(key_rows_ + i, dim_, keys_ + i, SPAN);
            if (i % 16 == 0) ahead_.fetch();
        }
        const bool widen = rows_count_ > TILE_ROWS || dim_ != width_;  // else whole registers are read of V as it lies
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
        const int first = position_of(row), last = position_of(row + count - 1);
        const int begin = visible_begin(first, start) / LANES * LANES;
        const int end = smaller(SPAN, (larger(0, visible_end(last, start)) + LANES - 1) / LANES * LANES);
        for (int i = 0; i < count * SPAN; i += LANES) Simd::store(scores_ + i, Simd::set(0.0f));
        if (begin < end) {
            const auto keys = [&](int k, int column) { return keys_ + k * SPAN + begin + column; };
            multiply_ahead(count, q_ + long(row) * width_, width_, keys, 0, dim_, scores_ + begin, SPAN, end - begin);
        }
        for (int i = 0; i < count; ++i) {
            const int position = position_of(row + i);
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
            const int position = position_of(row + i);
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
                const int position = position_of(row + i);
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
            const long place = out_place(row);
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

    const int width_;
    float *q_, *keys_, *values_, *zeros_, *scores_;
    Partial state_, span_;  // of the tile so far, and of a few of its rows over the current span
    const T* key_rows_[SPAN];
    const T* value_rows_[SPAN];
};

template <class T>
void attend_rows(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    const auto body = [&](int task, float* scratch) {
        TileTask<T>(arguments, tasks, scratch).run(tasks.tasks[task]);
    };
    run_tasks(pool, tasks.count, TileTask<T>::scratch_floats(arguments, tasks), body);
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
