#include "pool.hpp"

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include <unistd.h>

namespace kvtier {
namespace {

constexpr std::uint64_t OPEN = std::uint64_t(1) << 31;
constexpr std::uint64_t INSIDE = OPEN - 1;
constexpr auto SPIN = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits for a short time; returns whether it is so.
template <class Ready>
bool spin_until(const Ready& ready) {
    const auto deadline = std::chrono::steady_clock::now() + SPIN;
    while (!ready()) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        for (int i = 0; i < 16; ++i) pause();
    }
    return true;
}

}  // namespace

Pool::Pool(int threads) : owner_(getpid()) {
    if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
    for (int i = 0; i < threads; ++i) scratch_.emplace_back(nullptr, std::free);
    try {
        for (int i = 0; i + 1 < threads; ++i) workers_.emplace_back([this, i] { work_loop(i); });
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() {
    if (getpid() != owner_) {  // a forked child: the threads are not here, and joining them would never end
        new std::vector<std::thread>(std::move(workers_));
        return;
    }
    end();
}

void Pool::end() {
    stop_ = true;
    {
        std::lock_guard lock(mutex_);
        wake_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int tasks, std::size_t scratch_floats, TaskBody body, const void* context) {
    if (getpid() != owner_) throw std::runtime_error("kvtier kernels cannot be used after fork()");
    if (tasks <= 0) return;
    if (scratch_floats > scratch_floats_) {
        scratch_floats_ = (scratch_floats + 1023) / 1024 * 1024;
        for (auto& memory : scratch_) {
            memory.reset(static_cast<float*>(std::aligned_alloc(64, scratch_floats_ * sizeof(float))));
            if (!memory) {
                scratch_floats_ = 0;
                throw std::bad_alloc();
            }
        }
    }
    const int caller = int(workers_.size());
    if (tasks == 1 || workers_.empty()) {
        for (int task = 0; task < tasks; ++task) body(context, task, scratch_[caller].get());
        return;
    }
    body_ = body;
    context_ = context;
    tasks_ = tasks;
    next_task_.store(0, std::memory_order_relaxed);
    std::fegetenv(&environment_);
    const std::uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(job << 32 | OPEN);
    if (sleepers_.load() > 0) {
        std::lock_guard lock(mutex_);
        wake_.notify_all();
    }
    take_tasks(caller);
    state_.fetch_and(~OPEN);
    const auto alone = [&] { return (state_.load() & INSIDE) == 0; };
    if (!spin_until(alone)) {
        std::unique_lock lock(mutex_);
        caller_sleeps_.store(true);
        alone_.wait(lock, alone);
        caller_sleeps_.store(false);
    }
}

void Pool::take_tasks(int worker) {
    float* scratch = scratch_[worker].get();
    for (int task; (task = next_task_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) body_(context_, task, scratch);
}

void Pool::work_loop(int worker) {
    std::uint64_t last = 0;
    while (wait_for_job(last)) {
        std::uint64_t state = state_.load();
        last = state >> 32;
        while (state & OPEN && !state_.compare_exchange_weak(state, state + 1)) {}
        if (!(state & OPEN)) continue;
        last = state >> 32;
        std::fesetenv(&environment_);
        take_tasks(worker);
        state_.fetch_sub(1);
        if (caller_sleeps_.load()) {
            std::lock_guard lock(mutex_);
            alone_.notify_one();
        }
    }
}

// Returns true once there is a job with another number than `last`, false when the pool stops.
bool Pool::wait_for_job(std::uint64_t last) {
    const auto ready = [&] { return stop_.load() || state_.load() >> 32 != last; };
    if (!spin_until(ready)) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }
    return !stop_.load();
}

void run_tasks(Pool& pool, int tasks, std::size_t scratch_floats, TaskBody body, const void* context) {
    pool.run(tasks, scratch_floats, body, context);
}

}  // namespace kvtier
