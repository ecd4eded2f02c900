// Asks the memory for the K and V of the next spans while others are computed. Included by tile_view.hpp.
//
// A core waits for 16 lines at a time at most. More come only from the prefetcher of its L2 cache, which follows runs
// within a page, each at a pace of its own. So all runs that come next are asked for in turn, a few lines of each, not
// one after the other: 12 instead of 7 GB/s from runs of 2 KiB (docs/LOG.md). And in small steps between other work,
// since a core that asks for more than it may stands still.
#pragma once

#include <cstdint>

namespace kvtier {
namespace {

class Ahead {
  public:
    static constexpr int SPANS = 2;  // looked ahead: 8 runs of a page or less where a head has 64 dims in 16 bit

    void clear() { runs_count_ = next_ = turns_ = 0; }

    // What shall be asked for. Runs that do not fit are left to chance.
    void expect(const char* start, long bytes) {
        for (const char* end = start + bytes; start < end && runs_count_ < RUNS_MAX; ++runs_count_) {
            const char* page_end = start + (PAGE - std::uintptr_t(start) % PAGE);
            Run& run = runs_[runs_count_] = {start, page_end < end ? page_end : end};
            turns_ += int((run.end - run.start + TURN - 1) / TURN);
            start = run.end;
        }
    }

    // After all has been expected: cut into equal steps, so that it has been asked for after `steps` times fetch().
    void start(int steps) { step_ = (turns_ + steps - 1) / steps; }

    void fetch() { ask(step_); }
    void fetch_all() { ask(turns_); }

  private:
    struct Run {
        const char *start, *end;
    };
    static constexpr int LINE = 64, PAGE = 4096, TURN = 256, RUNS_MAX = 128;

    void ask(int turns) {
        for (; turns > 0 && runs_count_ > 0; --turns) {
            Run& run = runs_[next_];
            for (int i = 0; i < TURN; i += LINE) __builtin_prefetch(run.start + i, 0, 2);  // into the L2 cache
            run.start += TURN;
            if (run.start < run.end) ++next_;
            else run = runs_[--runs_count_];
            if (next_ >= runs_count_) next_ = 0;
        }
    }

    Run runs_[RUNS_MAX];
    int runs_count_ = 0, next_ = 0, turns_ = 0, step_ = 0;
};

}  // namespace
}  // namespace kvtier
