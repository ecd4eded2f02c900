// The rings that an io_uring shares with the kernel: entries that tell it what to do, completions that tell what came
// of it. Raw system calls, no liburing. All of it belongs to one thread, but for the descriptor, which whoever has the
// last word closes. Knows neither moves nor owners. Where the headers know no io_uring, there is nothing here.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sys/mman.h>
#include <sys/uio.h>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define KVTIER_URING

namespace kvtier {

inline unsigned load(const unsigned* value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
inline void store(unsigned* value, unsigned now) { __atomic_store_n(value, now, __ATOMIC_RELEASE); }

class KernelRing {
  public:
    int open(unsigned entry_count);  // 0, or the number of an error, with what was opened left to close()
    void unmap();
    void close();  // the descriptor; any thread, and a forked child

    // A table of registered buffers, empty at first, and an entry of it; its pages are pinned until the descriptor is
    // closed. 0, or the number of an error: EINVAL where the kernel is older than Linux 5.19, ENOMEM at RLIMIT_MEMLOCK.
    int make_buffer_table(unsigned place_count);
    int register_buffer(unsigned place, iovec memory);

    io_uring_sqe& next_entry();  // cleared; the kernel looks at it when it is entered next
    bool can_time_out() const { return can_time_out_; }
    // Hands over what is new and sleeps until `least` have ended, `longest_ns` at most if that is not 0, which is for
    // kernels that can time out. 0, or the number of an error; ETIME: less has ended.
    int enter(unsigned least, std::int64_t longest_ns);

    // Takes back what the kernel has not taken, each time with the number that an entry carries.
    template <class Each>
    void take_back(Each each) {
        const unsigned head = load(submit_head_);
        for (unsigned place = head; place != *submit_tail_; ++place) {
            each(entries_[submit_array_[place & *submit_mask_]].user_data);
        }
        store(submit_tail_, head);
    }

    // What has ended: the number that its entry carried, and its result.
    template <class Each>
    void reap(Each each) {
        unsigned head = *complete_head_;
        for (const unsigned tail = load(complete_tail_); head != tail; ++head) {
            const io_uring_cqe& completion = completions_[head & *complete_mask_];
            each(completion.user_data, completion.res);
        }
        store(complete_head_, head);
    }

  private:
    int ring_ = -1;
    bool can_time_out_ = false;
    void* rings_ = MAP_FAILED;
    io_uring_sqe* entries_ = static_cast<io_uring_sqe*>(MAP_FAILED);
    std::size_t rings_bytes_ = 0, entries_bytes_ = 0;
    unsigned *submit_head_, *submit_tail_, *submit_mask_, *submit_array_;
    unsigned *complete_head_, *complete_tail_, *complete_mask_;
    io_uring_cqe* completions_;
};

}  // namespace kvtier

#endif
