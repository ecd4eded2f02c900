// Memory that is registered with an io_uring: its pages are pinned once, where each move would pin them anew, which for
// pages of 4 KiB is most of what a move costs the CPU. Belongs to the ring's thread. Whoever registers memory keeps it
// mapped for as long as moves are given to the ring. Knows no moves. Owned by uring.cpp.
#pragma once

#include "kernel_ring.hpp"

#ifdef KVTIER_URING

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/uio.h>

namespace kvtier {

class RegisteredMemory {
  public:
    explicit RegisteredMemory(KernelRing& kernel) : kernel_(kernel) {}

    // 0, or the number of an error, with as much registered as could be. What is registered already is left as it is.
    // After ENOMEM nothing more is: what may be locked is the user's, and other rings need some of it.
    int add(const iovec& memory);
    // The number of the piece that all of `span` lies in; -1: there is none.
    int find(const iovec& span) const;

  private:
    struct Piece {
        std::uintptr_t begin, end;
        int number;
    };

    KernelRing& kernel_;
    bool has_table_ = false, is_short_ = false;
    std::vector<Piece> pieces_;  // by address, none over another
};

}  // namespace kvtier

#endif
