// Memory that is registered with an io_uring: its pages are pinned once, where each move would pin them anew, which for
// pages of 4 KiB is most of what a move costs the CPU. Belongs to the ring's thread. Whoever registers memory keeps it
// mapped for as long as moves are given to the ring. Knows no moves. Owned by under_way.cpp.
//
// A host's DRAM takes seconds or minutes: it is registered piece by piece, so that moves go on between two of them.
#pragma once

#include "kernel_ring.hpp"

#ifdef KVTIER_URING

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <sys/uio.h>

namespace kvtier {

class RegisteredMemory {
  public:
    // Pieces of so many bytes, at most 1 GiB, which is the kernel's bound.
    RegisteredMemory(KernelRing& kernel, std::size_t piece_bytes) : kernel_(kernel), piece_bytes_(piece_bytes) {}

    // Memory that `go_on` registers, after what was added before. What is registered already is left as it is.
    void add(const iovec& memory) { waiting_.push_back(memory); }
    bool waits() const { return !waiting_.empty(); }
    // Gets on with it for a few dozen ms at most. 0, or the number of an error: what was left of that memory stays as it
    // was. After ENOMEM nothing more is registered: what may be locked is the user's, and other rings need some of it.
    int go_on();
    // The number of the piece that all of `span` lies in; -1: there is none.
    int find(const iovec& span) const;

  private:
    struct Piece {
        std::uintptr_t begin, end;
        int number;
    };

    int register_piece(std::uintptr_t begin, std::uintptr_t end);

    KernelRing& kernel_;
    const std::size_t piece_bytes_;
    std::deque<iovec> waiting_;
    std::size_t mapped_bytes_ = 0;  // of the first piece of the first of these
    bool has_table_ = false, is_short_ = false;
    std::vector<Piece> pieces_;  // by address, none over another
};

}  // namespace kvtier

#endif
