// Attention of bf16 queries over bf16 rows for one tile, on the matrix unit. Included by isa_amx.cpp.
//
// Up to 16 query rows take V as it lies and two spans at a time, more rows turn V once for all of them and take one.
// What is computed together begins at a multiple of itself and is folded left to right: bits do not depend on threads.
#pragma once

#include <cmath>

#include "matrix_amx.hpp"
#include "tile_view.hpp"

namespace kvtier {
namespace {

class UnitTask : TileView {
  public:
    static constexpr int TILE_QUERY_ROWS = 384;  // that share a turned V

    UnitTask(const AttendArguments& arguments, const AttendTasks& tasks, float* scratch)
        : TileView(arguments, tasks), depth_(depth_of(arguments)),
          lie_(rows_.block_tokens % BLOCK == 0 && dim_ % DEPTH == 0), scratch_(scratch) {
        const long rows = padded(tasks.tile_rows_max);
        queries_ = scratch_ + MatrixUnit::scratch_floats(depth_);
        state_ = queries_ + rows * depth_ / 2;
        zeros_ = reinterpret_cast<bf16*>(state_ + rows * (depth_ + 2));
        copies_ = zeros_ + BLOCK * depth_;
        __builtin_memset(zeros_, 0, sizeof(bf16) * BLOCK * depth_);
    }

    static long scratch_floats(const AttendArguments& arguments, const AttendTasks& tasks) {
        const long rows = padded(tasks.tile_rows_max), depth = depth_of(arguments);
        return MatrixUnit::scratch_floats(int(depth)) + rows * (depth * 3 / 2 + 2) + BLOCK * depth / 2 + PLACES * depth;
    }

    void run(const Task& task) {
        const Tile& tile = tasks_.tiles[task.tile];
        turned_ = tile.queries * group_heads_ > BLOCK;
        step_ = turned_ ? 1 : 2;
        look_at(task, step_);
        for (lanes_ = 1; lanes_ < rows_count_ && lanes_ < BLOCK;) lanes_ *= 2;
        blocks_ = (rows_count_ + lanes_ - 1) / lanes_;
        load_queries();
        MatrixUnit unit(lanes_, depth_, turned_, arguments_.scale, scratch_);
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
    static int depth_of(const AttendArguments& arguments) { return (arguments.rows.dim + DEPTH - 1) / DEPTH * DEPTH; }
    int next_step(int span) const { return ((tile_->first_span + span) / step_ + 1) * step_ - tile_->first_span; }

    // What is known of a block of rows has the form of MatrixUnit::product(). A row that has seen nothing has total 0.
    long block_floats() const { return long(depth_) * lanes_ + 2 * LANES; }
    float* top_of(float* partial) const { return partial + long(depth_) * lanes_; }
    float* total_of(float* partial) const { return top_of(partial) + LANES; }

    void clear(float* partials) const {
        for (int block = 0; block < blocks_; ++block, partials += block_floats()) {
            for (int i = 0; i < block_floats(); i += LANES) Simd::store(partials + i, Simd::set(0.0f));
            Simd::store(top_of(partials), Simd::set(-INFINITY));
        }
    }

    // q as [block][pair of dims][lane], in words of two bf16.
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
            for (int dim = 0; dim < depth_; dim += 2) {
                for (int lane = 0; lane < lanes_; ++lane) __builtin_memcpy(to++, dim < dim_ ? from[lane] + dim : zeros_, 4);
            }
        }
    }

    int begin_at(int position, int start) const { return visible_begin(position, start); }
    int end_at(int position, int start) const { return visible_end(position, start, step_ * SPAN); }

    // Folds the positions from `start` on into `to`.
    void attend_step(MatrixUnit& unit, int start, float* to) {
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

    void attend_places(MatrixUnit& unit, int start, int begin, int end, int first_row, int end_row, float* to) {
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

    // K and V of places begin .. end - 1. Up to the next multiples of DEPTH, V is zeros and K anything.
    void find_places(int start, int begin, int end) {
        const int first = begin / BLOCK, last = (end - 1) / BLOCK;
        places_.keys[first ^ 1] = places_.keys[last ^ 1] = places_.values[first ^ 1] = places_.values[last ^ 1] = zeros_;
        if (!lie_) return copy_places(start, begin, end);
        for_pieces(start, first * BLOCK, (last + 1) * BLOCK, [&](int place, int count, const char* keys) {
            for (int i = 0; i < count; i += BLOCK, keys += 2L * BLOCK * dim_) {
                places_.keys[(place + i) / BLOCK] = reinterpret_cast<const bf16*>(keys);
                places_.values[(place + i) / BLOCK] = reinterpret_cast<const bf16*>(keys + rows_.value_bytes);
                reads(places_.keys[(place + i) / BLOCK], long(BLOCK) * dim_);
                reads(places_.values[(place + i) / BLOCK], long(BLOCK) * dim_);
            }
        });
        if (begin % BLOCK) copy_values(first, begin, end);
        if (end % BLOCK && (last > first || begin % BLOCK == 0)) copy_values(last, begin, end);
    }

    void copy_values(int block, int begin, int end) {
        bf16* to = copies_ + long(block) * BLOCK * depth_;
        for (int i = 0; i < BLOCK; ++i) {
            const int place = block * BLOCK + i;
            const bf16* from = place >= begin && place < end ? places_.values[block] + i * depth_ : zeros_;
            __builtin_memcpy(to + i * depth_, from, sizeof(bf16) * depth_);
        }
        places_.values[block] = to;
    }

    void copy_places(int start, int begin, int end) {
        bf16* values = copies_ + PLACES * depth_;
        __builtin_memset(copies_, 0, sizeof(bf16) * 2 * PLACES * depth_);
        for (int block = begin / BLOCK; block * BLOCK < end; ++block) {
            places_.keys[block] = copies_ + long(block) * BLOCK * depth_;
            places_.values[block] = values + long(block) * BLOCK * depth_;
        }
        for_pieces(start, begin, end, [&](int place, int count, const char* keys) {
            for (int i = 0; i < count; ++i, keys += 2L * dim_) {
                __builtin_memcpy(copies_ + (place + i) * depth_, keys, sizeof(bf16) * dim_);
                __builtin_memcpy(values + (place + i) * depth_, keys + rows_.value_bytes, sizeof(bf16) * dim_);
            }
        });
    }

    // Whether V at places begin .. end - 1 has neither infinities nor NaN.
    bool finite(int begin, int end) const {
        std::uint16_t largest = 0;
        for (int place = begin; place < end; ++place) {
            const bf16* row = places_.values[place / BLOCK] + place % BLOCK * depth_;
            for (int i = 0; i < depth_; ++i) {
                const std::uint16_t exponent = row[i].bits & 0x7f80;
                largest = largest > exponent ? largest : exponent;
            }
        }
        return largest < 0x7f80;
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
    void write_row(const float* even, float factor, long place) const {
        bf16* out = static_cast<bf16*>(arguments_.out) + place * dim_;
        const auto words = [&](const float* from) {
            return _mm512_cvtepu16_epi32(Simd::narrow(Simd::mul(Simd::load(from), Simd::set(factor)), bf16{}));
        };
        for (int dim = 0; dim < dim_; dim += DEPTH, even += LANES) {
            const __m512i odd = _mm512_slli_epi32(words(even + lanes_ * depth_ / 2), 16);
            const __mmask16 pairs = Simd::mask(smaller(DEPTH, dim_ - dim) / 2);
            writes(out + dim, smaller(DEPTH, dim_ - dim));
            _mm512_mask_storeu_epi32(out + dim, pairs, _mm512_or_si512(words(even), odd));
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

    const int depth_;
    const bool lie_;  // whether K and V can be used where they lie
    float *const scratch_, *queries_, *state_;
    bf16 *zeros_, *copies_;
    bool turned_ = false;
    int step_ = 1, lanes_ = 1, blocks_ = 1;
    Places places_;
};

void attend_on_unit(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    const auto body = [&](int task, float* scratch) { UnitTask(arguments, tasks, scratch).run(tasks.tasks[task]); };
    run_tasks(pool, tasks.count, UnitTask::scratch_floats(arguments, tasks), body);
}

void attend(Pool& pool, const AttendArguments& arguments, const AttendTasks& tasks) {
    const bool bf16s = arguments.rows.type == Type::bf16 && arguments.q_type == Type::bf16;
    return bf16s ? attend_on_unit(pool, arguments, tasks) : avx512_kernels()->attend(pool, arguments, tasks);
}

}  // namespace
}  // namespace kvtier
