// Moves that are in the kernel: each in one entry of its ring or, if its last part lies in registered memory, in an
// entry for each part, since the kernel (before Linux 6.15) takes no two places of such memory in one.
//
// A move and the places of its parts stay where they are until all its entries have ended. All of it belongs to the
// ring's thread, but for the count that anybody may read. Knows no queue and no owners. Owned by uring.cpp.
#pragma once

#include "kernel_ring.hpp"

#ifdef KVTIER_URING

#include <atomic>
#include <cstdint>
#include <vector>

#include "registered.hpp"
#include "uring.hpp"

namespace kvtier {

constexpr std::size_t PARTS_MAX = 2;  // of a move that goes part by part

class UnderWay {
  public:
    UnderWay(KernelRing& kernel, int depth, std::size_t piece_bytes);

    // For so many entries the kernel's ring must have room.
    static unsigned entries_max(int depth) { return unsigned(depth * PARTS_MAX); }

    RegisteredMemory& registered() { return registered_; }
    std::uint64_t registered_moves() const { return registered_moves_; }

    std::size_t room() const { return free_.size(); }
    int count() const { return depth_ - int(free_.size()); }

    // Gives a move to the kernel; there must be room.
    void begin(Move move, std::int64_t now_ns);
    // The entry with this number has ended so. Whether its move has, too: then it is handed back, with its end.
    bool end(std::uint64_t entry, int result, std::int64_t now_ns, Move& move, End& end);

  private:
    struct Slot {
        Move move;
        std::int64_t started_ns;
        int entries;
        int left;  // of these have not ended
        int results[PARTS_MAX];

        int result() const;
    };

    void enter_whole(int slot);
    void enter_part(int slot, int number, std::uint64_t offset);

    KernelRing& kernel_;
    RegisteredMemory registered_;
    std::atomic<std::uint64_t> registered_moves_ = 0;
    const int depth_;
    std::vector<Slot> slots_;
    std::vector<int> free_;
};

}  // namespace kvtier

#endif
