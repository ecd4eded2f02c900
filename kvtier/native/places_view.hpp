// Where K and V of some positions lie for kernels that take 16 at a time: in their rows or, where those do not fit, in
// copies. Included by attend_bf16.hpp.
#pragma once

#include "row_block.hpp"
#include "tile_view.hpp"

namespace kvtier {
namespace {

class PlacesView : protected TileView {
  protected:
    PlacesView(const AttendArguments& arguments, const AttendTasks& tasks, float* scratch)
        : TileView(arguments, tasks), depth_(depth_of(arguments)),
          lie_(rows_.block_tokens % BLOCK == 0 && dim_ % DEPTH == 0), zeros_(reinterpret_cast<bf16*>(scratch)),
          copies_(zeros_ + BLOCK * depth_) {
        __builtin_memset(zeros_, 0, sizeof(bf16) * BLOCK * depth_);
    }

    static int depth_of(const AttendArguments& arguments) { return (arguments.rows.dim + DEPTH - 1) / DEPTH * DEPTH; }
    static long places_floats(long depth) { return BLOCK * depth / 2 + PLACES * depth; }

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

    const int depth_;
    const bool lie_;  // whether K and V can be used where they lie
    bf16 *const zeros_, *const copies_;
    Places places_;
};

}  // namespace
}  // namespace kvtier
