// Asks the memory for the K and V of the next span while the current one is computed. Included by attend.hpp.
//
// Rows lie anywhere, so the CPU cannot guess them; asked for all at once they would stall it, so it asks in small steps.
#pragma once

namespace kvtier {
namespace {

class Ahead {
  public:
    static constexpr int STEPS = 12;

    void clear() { count_ = next_ = lines_ = 0; }

    void expect(const char* start, long bytes) {
        if (count_ == PIECES_MAX) return;
        pieces_[count_++] = {start, start + bytes};
        lines_ += int((bytes + LINE_PAIR - 1) / LINE_PAIR);
    }

    // One of STEPS equal parts of what is expected; nothing once all has been asked for.
    void fetch() {
        for (int left = (lines_ + STEPS - 1) / STEPS; left > 0 && next_ < count_; ++next_) {
            Piece& piece = pieces_[next_];
            for (; piece.start < piece.end; piece.start += LINE_PAIR, --left) {
                if (left == 0) return;
                __builtin_prefetch(piece.start);
            }
        }
    }

  private:
    struct Piece {
        const char *start, *end;
    };
    static constexpr int LINE_PAIR = 128;  // the CPU brings a line's neighbour by itself: measured, half the requests
    static constexpr int PIECES_MAX = 2 * SPAN;
    Piece pieces_[PIECES_MAX];
    int count_ = 0, next_ = 0, lines_ = 0;
};

}  // namespace
}  // namespace kvtier
