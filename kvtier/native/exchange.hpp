// Where the callers of an io_uring and its thread meet: moves that wait, ends that nobody has taken yet, and two
// eventfds: one wakes the thread while it sleeps in the kernel, one is the bell that callers wait for.
//
// All of it is under one mutex, which in a forked child may be held for ever: there nothing may be called but forked()
// and close_descriptors(). Knows no kernel interface but eventfds. Owned by uring.cpp.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "uring.hpp"

namespace kvtier {

class Exchange {
  public:
    int open();  // makes the eventfds; 0, or the number of an error
    bool forked() const { return getpid() != owner_; }
    void close_descriptors();

    // ---- callers, any thread; as Ring says

    void push(std::vector<Move> moves);
    std::vector<Move> cancel();
    std::vector<End> take();
    int bell() const { return bell_; }
    void wake();
    void register_memory(iovec memory);
    int refusal();        // the number of the last error with memory that was to be registered; 0: none
    bool close();         // whether the thread has left
    int wait_for_thread();  // what it said when it had begun

    // ---- the thread

    void begun(int failure);
    // Takes up to `room` moves and all memory to be registered, waiting while there is nothing to do, if the thread has
    // nothing else to go on with; false: there never will be.
    bool take_work(std::vector<Move>& moves, std::size_t room, std::vector<iovec>& memories, bool goes_on);
    void refused(int error);  // memory that was to be registered; rings the bell
    // Hands ends over, and empties `ends`; the thread is no longer about to sleep in the kernel. While much waits in the
    // queue, callers hear of ends by the batch: the bell may be held back, if the thread's sleep in the kernel can time
    // out. Returns in how many ns at most it must be here again; 0: whenever more has ended.
    std::int64_t deliver(std::vector<End>& ends, std::int64_t now_ns, bool can_time_out);
    int alarm() const { return alarm_; }   // readable once moves have come while it slept in the kernel with room
    void silence();
    void leave();

  private:
    void ring_bell();

    const pid_t owner_ = getpid();
    std::mutex mutex_;
    std::condition_variable fed_;    // the thread sleeps on it while nothing is in the kernel
    std::condition_variable begun_;  // the constructor of the ring sleeps on it
    std::deque<Move> queue_;
    std::vector<iovec> memories_;  // to be registered
    std::vector<End> ends_;
    std::size_t moving_ = 0;  // taken from the queue and not among the ends yet
    bool sleeps_ = false;     // the thread sleeps in the kernel with room for more, or is about to
    std::int64_t held_since_ns_ = 0;  // the bell is held back; 0: it is not
    bool has_begun_ = false, stop_ = false, rung_ = false, left_ = false;
    int failure_ = 0, refusal_ = 0;
    int alarm_ = -1, bell_ = -1;
};

}  // namespace kvtier
