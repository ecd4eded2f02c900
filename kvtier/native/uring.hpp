// An io_uring and the thread that feeds and empties it: moves in, ends out, summed, all without the GIL.
//
// Raw system calls, no liburing. At most `depth` moves are in the kernel; the rest wait in a queue of its own, whose
// bound is the caller's business, like descriptors and memory, which must stay until a move's end was handed out; the
// owners of what is never handed out, because the ring is dropped first, are nobody's any more.
// Knows nothing of short moves and what to do about them. In a forked child push() throws and the rest does nothing,
// but give up the descriptors when it is told to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

namespace kvtier {

enum class Operation : std::uint8_t { read, write, sync };

struct Move {
    void* owner;  // the caller's, handed back with its end
    std::uint64_t tag;
    Operation operation;
    int descriptor;
    std::uint64_t offset;
    std::vector<iovec> parts;
    std::size_t slice_bytes;  // > 0: sums are wanted of the slices of the last part, once all has been read

    std::int64_t total_bytes() const;
};

struct End {
    void* owner;
    std::uint64_t tag;
    int result;  // bytes, or a negative error number
    bool whole;  // all bytes have moved
    std::int64_t started_ns;  // given to the kernel, monotonic
    std::int64_t ended_ns;
    std::string sums;  // 8 bytes a slice, most significant first; empty unless all that was wanted has been read
};

// Memory is registered in such pieces: what lies across the border of two moves as if it were not registered.
constexpr std::size_t PIECE_BYTES = std::size_t(256) << 20;

class Ring {
  public:
    explicit Ring(int depth, std::size_t piece_bytes = PIECE_BYTES);  // throws std::system_error as the kernel says
    ~Ring();                   // what is stuck in the kernel is left to its thread
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    void push(std::vector<Move> moves);  // any thread
    std::vector<Move> cancel();          // what was not in the kernel yet, and never will be
    std::vector<End> take();             // what has ended
    int bell() const;  // an eventfd: rings when take() has something, later if more waits; at wake(); at the very end
    void wake();
    // From when the thread has seen to it, moves whose last part lies in this memory, which must stay mapped for as long
    // as moves are pushed, cost less; if the kernel refuses, the bell rings, and nothing else changes.
    void register_memory(iovec memory);
    int refusal() const;                   // the number of the kernel's last such error; 0: none
    std::uint64_t registered_moves() const;  // how many have gone to the kernel so
    bool close();  // takes no more; whether its thread and descriptors are gone, which the bell tells, too
    void after_fork_in_child();

  private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace kvtier
