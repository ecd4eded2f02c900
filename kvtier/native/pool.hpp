// A small thread pool: the calling thread works too, tasks come from one counter, who waits spins briefly and sleeps.
//
// Owns threads and their scratch memory; knows nothing of kernels. One caller at a time. A forked child must not use
// the pool (its threads do not exist there): run() throws, and the destructor leaves them alone.
#pragma once

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "tasks.hpp"

namespace kvtier {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }

    void run(int tasks, std::size_t scratch_floats, TaskBody body, const void* context);  // see tasks.hpp

  private:
    void end();  // wakes and joins all workers
    void work_loop(int worker);
    void take_tasks(int worker);
    bool wait_for_job(std::uint64_t last);

    std::vector<std::thread> workers_;
    std::vector<std::unique_ptr<float, void (*)(void*)>> scratch_;  // one for each thread, the caller's last
    std::size_t scratch_floats_ = 0;
    pid_t owner_;

    TaskBody body_ = nullptr;
    const void* context_ = nullptr;
    int tasks_ = 0;
    std::fenv_t environment_{};  // the caller's rounding and denormal modes, so that bits do not depend on the thread

    // Job number in the upper half, then an "open" bit, then the count of workers inside. Workers enter only an open
    // job, so the caller never waits for one that is still asleep.
    std::atomic<std::uint64_t> state_{0};
    std::atomic<int> next_task_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;   // there is a job, or the pool stops
    std::condition_variable alone_;  // no worker is inside
};

}  // namespace kvtier
