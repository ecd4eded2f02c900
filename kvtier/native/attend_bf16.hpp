// Attention of bf16 queries over bf16 rows for one tile, on a Unit that multiplies up to 16 rows at once: MatrixUnit or
// DotUnit. Included by isa_*.cpp after matrix_*.hpp.
//
// Up to 16 query rows take V as it lies and two spans at a time, more rows turn V once for all of them and take one.
// What is computed together begins at a multiple of itself and is folded left to right: bits do not depend on threads.
#pragma once

#include "places_view.hpp"

namespace kvtier {
namespace {

template <class Unit>
class UnitTask : PlacesView {
  public:
    static constexpr int TILE_QUERY_ROWS = 384;  // that share a turned V

    UnitTask(const AttendArguments& arguments, const AttendTasks& tasks, float* scratch)
        : PlacesView(arguments, tasks, scratch), scratch_(scratch + places_floats(depth_)) {
        queries_ = scratch_ + Unit::scratch_floats(depth_);
        state_ = queries_ + padded(tasks.tile_rows_max) * long(depth_) / 2;
    }

    static long scratch_floats(const AttendArguments& arguments, const AttendTasks& tasks) {
        const long rows = padded(tasks.tile_rows_max), depth = depth_of(arguments);
        return places_floats(depth) + Unit::scratch_floats(int(depth)) + rows * (depth * 3 / 2 + 2);
    }

    void run(const Task& task) {
        const Tile& tile = tasks_.tiles[task.tile];
        turned_ = tile.queries * group_heads_ > BLOCK;
        step_ = turned_ ? 1 : 2;
        look_at(task, step_);
        for (lanes_ = 1; lanes_ < rows_count_ && lanes_ < BLOCK;) lanes_ *= 2;
        blocks_ = (rows_count_ + lanes_ - 1) / lanes_;
        load_queries();
        Unit unit(lanes_, depth_, turned_, arguments_.scale, scratch_);
        if (tile.groups == 1) clear(state_);
        for (int span = first_span_; span < end_span_; span = next_step(span)) {
            float* to = state_;
            if (tile.groups > 1) clear(to = partials_of(span));
            look_ahead(span, 2 * (SPAN / BLOCK) * (depth_ / DEPTH));  // scores, and products or turned V
            attend_step(unit, (tile.first_span + span) / step_ * step_ * SPAN, to);
        }
        if (tile.groups > 1) {
            if (!is_last()) return;
            clear(state_);
            for (int span = 0; span < spans(); span = next_step(span)) {
                for (int block = 0; block < blocks_; ++block) {
                    fold(partials_of(span) + block * block_floats(), block, 0, rows_count_, state_);
                }
            }
        }
        write_result();
    }

  private:
    int next_step(int span) const { return ((tile_->first_span + span) / step_ + 1) * step_ - tile_->first_span; }

    // What is known of a block of rows has the form of Unit::product(). A row that has seen nothing has total 0.
    long block_floats() const { return long(depth_) * lanes_ + 2 * LANES; }
    float* top_of(float* partial) const { return partial + long(depth_) * lanes_; }
    float* total_of(float* partial) const { return top_of(partial) + LANES; }

    void clear(float* partials) const {
        for (int block = 0; block < blocks_; ++block, partials += block_floats()) {
            for (int i = 0; i < block_floats(); i += LANES) Simd::store(partials + i, Simd::set(0.0f));
            Simd::store(top_of(partials), Simd::set(-INFINITY));
        }
    }

    // q of each block in words of two bf16, each in its Unit::query_place().
    void load_queries() const {
        for (int block = 0; block < blocks_; ++block) {
            const bf16* from[BLOCK];
            for (int lane = 0; lane < BLOCK; ++lane) {
                const int row = block * lanes_ + lane;
                const bool there = lane < lanes_ && row < rows_count_;
                from[lane] = there ? static_cast<const bf16*>(arguments_.q) + q_offset(row) : zeros_;
            }
            float* to = queries_ + long(block) * lanes_ * depth_ / 2;
            if (lanes_ == BLOCK) {
                Simd::transpose_pairs(from, dim_, depth_, to, BLOCK);
                continue;
            }
            for (int pair = 0; pair < depth_ / 2; ++pair) {
                for (int lane = 0; lane < lanes_; ++lane) {
                    const bf16* word = 2 * pair < dim_ ? from[lane] + 2 * pair : zeros_;
                    __builtin_memcpy(to + Unit::query_place(lanes_, pair, lane), word, 4);
                }
            }
        }
    }

    int begin_at(int position, int start) const { return visible_begin(position, start); }
    int end_at(int position, int start) const { return visible_end(position, start, step_ * SPAN); }

    // Folds the positions from `start` on into `to`.
    void attend_step(Unit& unit, int start, float* to) {
        const int first = tile_->position, last = first + tile_->queries - 1;
        const int begin = begin_at(first, start), end = end_at(last, start);
        find_places(start, begin, end);
        if (finite(begin, smaller(end, begin_at(last, start))) && finite(larger(begin, end_at(first, start)), end)) {
            return attend_places(unit, start, begin, end, 0, rows_count_, to);
        }
        for (int query = 0; query < tile_->queries; ++query) {  // 0 times what a query does not see would be NaN
            const int own_begin = begin_at(first + query, start), own_end = end_at(first + query, start);
            if (own_begin >= own_end) continue;
            find_places(start, own_begin, own_end);
            attend_places(unit, start, own_begin, own_end, query * group_heads_, (query + 1) * group_heads_, to);
        }
    }

    void attend_places(Unit& unit, int start, int begin, int end, int first_row, int end_row, float* to) {
        begin = begin / DEPTH * DEPTH;
        end = (end + DEPTH - 1) / DEPTH * DEPTH;
        if (turned_) unit.turn_values(places_, begin, end, ahead_);
        for (int block = first_row / lanes_; block * lanes_ < end_row; ++block) {
            unit.score(queries_ + long(block) * lanes_ * depth_ / 2, places_, begin, end, ahead_);
            hide(unit.scores(), block, start, begin, end);
            unit.weigh(begin, end);
            unit.multiply(places_, begin, end, ahead_);
            fold(unit.product(), block, first_row, end_row, to);
        }
    }

    // Scores of what a row does not see become -inf.
    void hide(float* scores, int block, int start, int begin, int end) const {
        const int first = position_of(block * lanes_), last = position_of(smaller(block * lanes_ + lanes_, rows_count_) - 1);
        const int tokens = LANES / lanes_;  // in a vector
        const int common_begin = (begin_at(last, start) + tokens - 1) / tokens * tokens;
        const int common_end = end_at(first, start) / tokens * tokens;
        if (begin >= common_begin && end <= common_end) return;
        alignas(64) std::int32_t begins[LANES], ends[LANES];  // less the place of a lane within its vector
        for (int i = 0; i < LANES; ++i) {
            const int position = position_of(smaller(block * lanes_ + i % lanes_, rows_count_ - 1));
            begins[i] = begin_at(position, start) - i / lanes_;
            ends[i] = end_at(position, start) - i / lanes_;
        }
        for (int place = begin; place < end; place += tokens) {
            if (place == common_begin && common_begin < common_end) place = common_end;
            if (place >= end) break;
            const __m512i here = _mm512_set1_epi32(place);
            const __mmask16 seen = _mm512_cmpge_epi32_mask(here, _mm512_load_si512(begins)) &
                                   _mm512_cmplt_epi32_mask(here, _mm512_load_si512(ends));
            float* at = scores + place * lanes_;
            Simd::store(at, _mm512_mask_mov_ps(Simd::set(-INFINITY), seen, Simd::load(at)));
        }
    }

    // Folds rows first_row .. end_row - 1 of a block into that block of `partials`.
    void fold(float* from, int block, int first_row, int end_row, float* partials) const {
        float* to = partials + block * block_floats();
        const int begin = larger(0, first_row - block * lanes_), end = smaller(lanes_, end_row - block * lanes_);
        const Floats old_top = Simd::load(top_of(to)), new_top = Simd::load(top_of(from)), top = Simd::max(old_top, new_top);
        const __mmask16 blind = _mm512_cmp_ps_mask(top, Simd::set(-INFINITY), _CMP_EQ_OQ);
        const Floats base = _mm512_mask_mov_ps(top, blind, Simd::set(0.0f));
        const Floats old_scale = exp(Simd::sub(old_top, base)), new_scale = exp(Simd::sub(new_top, base));
        const auto merge = [](float* a, const float* b, Floats old_part, Floats new_part, __mmask16 which) {
            const Floats sum = Simd::fma(Simd::load(b), new_part, Simd::mul(Simd::load(a), old_part));
            _mm512_mask_storeu_ps(a, which, sum);
        };
        __mmask16 lanes = 0xffff;
        if (first_row > 0 || end_row < rows_count_) {
            for (int i = 0; i < LANES; ++i) {
                if (i % lanes_ < begin || i % lanes_ >= end) lanes = __mmask16(lanes & ~(1u << i));
            }
        }
        if (turned_) {
            for (int i = 0; i < depth_ * BLOCK; i += LANES) merge(to + i, from + i, old_scale, new_scale, lanes);
        } else {
            alignas(64) float old_scales[LANES], new_scales[LANES];
            Simd::store(old_scales, old_scale);
            Simd::store(new_scales, new_scale);
            for (int row = begin; row < end; ++row) {
                const Floats old_part = Simd::set(old_scales[row]), new_part = Simd::set(new_scales[row]);
                for (int i = row * depth_ / 2; i < (row + 1) * depth_ / 2; i += LANES) {
                    const int odd = i + lanes_ * depth_ / 2;
                    merge(to + i, from + i, old_part, new_part, 0xffff);
                    merge(to + odd, from + odd, old_part, new_part, 0xffff);
                }
            }
        }
        merge(total_of(to), total_of(from), old_scale, new_scale, lanes);
        _mm512_mask_storeu_ps(top_of(to), lanes, top);
    }

    void write_result() const {
        float* partial = state_;
        for (int block = 0; block < blocks_; ++block, partial += block_floats()) {
            const float *tops = top_of(partial), *totals = total_of(partial);
            alignas(64) float factors[LANES];
            Simd::store(factors, Simd::div(Simd::set(1.0f), Simd::load(totals)));
            if (turned_) write_turned(partial, block, factors);
            for (int lane = 0; lane < lanes_ && block * lanes_ + lane < rows_count_; ++lane) {
                const long place = out_place(block * lanes_ + lane);
                arguments_.lse[place] = tops[lane] + logf(totals[lane]);
                if (!turned_) write_row(partial + lane * depth_ / 2, factors[lane], place);
            }
        }
    }
    void write_row(const float* half, float factor, long place) const {
        bf16* out = static_cast<bf16*>(arguments_.out) + place * dim_;
        const auto words = [&](const float* from) {
            return _mm512_cvtepu16_epi32(Simd::narrow(Simd::mul(Simd::load(from), Simd::set(factor)), bf16{}));
        };
        for (int dim = 0; dim < dim_; dim += DEPTH, half += LANES) {
            const __mmask16 pairs = Simd::mask(smaller(DEPTH, dim_ - dim) / 2);
            writes(out + dim, smaller(DEPTH, dim_ - dim));
            _mm512_mask_storeu_epi32(out + dim, pairs, Unit::join_dims(words(half), words(half + lanes_ * depth_ / 2)));
        }
    }
    void write_turned(const float* partial, int block, const float* factors) const {
        const int rows = smaller(BLOCK, rows_count_ - block * BLOCK);
        alignas(64) float turned[BLOCK * LANES];
        for (int dim = 0; dim < dim_; dim += LANES) {
            const float* from[LANES];
            for (int i = 0; i < LANES; ++i) from[i] = partial + (dim + i) * BLOCK;
            Simd::transpose(from, rows, turned, LANES);
            for (int row = 0; row < rows; ++row) {
                const Floats x = Simd::mul(Simd::load(turned + row * LANES), Simd::set(factors[row]));
                bf16* out = static_cast<bf16*>(arguments_.out) + out_place(block * BLOCK + row) * dim_ + dim;
                Simd::store(out, x, smaller(LANES, dim_ - dim));
            }
        }
    }

    float *const scratch_, *queries_, *state_;
    bool turned_ = false;
    int step_ = 1, lanes_ = 1, blocks_ = 1;
};

template <class Unit>
void attend(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    using Work = UnitTask<Unit>;
    if (arguments.rows.type != Type::bf16 || arguments.q_type != Type::bf16) {
        return avx512_kernels()->attend(pool, arguments, tasks);
    }
    const auto body = [&](int task, float* scratch) { Work(arguments, tasks, scratch).run(tasks.tasks[task]); };
    run_tasks(pool, tasks.count, Work::scratch_floats(arguments, tasks), body);
}

// The kernels of AVX-512, but for attention of bf16.
template <class Unit>
KernelTable table_of(const char* isa) {
    KernelTable table = *avx512_kernels();
    table.isa = isa;
    table.bf16_tile_rows = UnitTask<Unit>::TILE_QUERY_ROWS;
    table.attend = attend<Unit>;
    return table;
}

}  // namespace
}  // namespace kvtier
