#include "uring.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <poll.h>

#include "checksum.hpp"
#include "exchange.hpp"
#include "kernel_ring.hpp"
#include "under_way.hpp"

namespace kvtier {

std::int64_t Move::total_bytes() const {
    std::int64_t total = 0;
    for (const iovec& part : parts) total += std::int64_t(part.iov_len);
    return total;
}

#ifdef KVTIER_URING

namespace {

constexpr std::uint64_t ALARM = ~std::uint64_t(0);
constexpr int REFUSALS_MAX = 64;
constexpr long REFUSAL_PAUSE_NS = 1'000'000;
constexpr int TOGETHER_SHARE = 4, TOGETHER_MAX = 8;  // of what is under way so much, at most so many, end together
constexpr std::int64_t TOGETHER_NS = 500'000;        // or what has ended by then

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void pause_ns(long nanoseconds) {
    const timespec span{0, nanoseconds};
    nanosleep(&span, nullptr);
}

}  // namespace

struct Ring::State {
    State(int depth_, std::size_t piece_bytes) : depth(depth_), under_way(kernel, depth_, piece_bytes) {}

    ~State() {
        if (!exchange.forked()) close_descriptors();
    }

    Exchange exchange;
    KernelRing kernel;

    void close_descriptors() {
        kernel.close();
        exchange.close_descriptors();
    }

    // ---- the ring's thread alone

    const int depth;
    UnderWay under_way;
    bool alarm_armed = false;
    bool flowing = false;  // something has ended since it last slept in vain
    std::int64_t bell_within_ns = 0;  // it is held back, and may be for so long; 0: it is not
    int refusals = 0;
    const Checksum checksum = checksum_for("auto");
    std::vector<Move> done;  // out of the kernel, on their way to the callers
    std::vector<End> ends;   // of those, in the same order

    void run();
    int open();
    void sum();
    void go_on_registering();
    void arm_alarm();
    void enter(bool sleep);
    void give_back_unsubmitted(int error);
    void reap();
    void end(std::uint64_t entry, int result);
};

int Ring::State::open() {
    if (const int error = kernel.open(UnderWay::entries_max(depth) + 1)) return error;  // one more for the alarm
    return exchange.open();
}

void Ring::State::run() {
    sigset_t signals;
    sigfillset(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // they are other threads' business
    const int error = open();
    exchange.begun(error);
    std::vector<Move> moves;
    std::vector<iovec> memories;
    RegisteredMemory& registered = under_way.registered();
    while (!error && exchange.take_work(moves, under_way.room(), memories, registered.waits())) {
        for (const iovec& memory : memories) registered.add(memory);
        // While moves are under way it gets on with that when the disk has work again and callers have their ends.
        const bool at_once = !memories.empty() || (moves.empty() && under_way.count() == 0);
        if (at_once) go_on_registering();
        for (Move& move : moves) under_way.begin(std::move(move), now_ns());
        if (under_way.count() == 0 && ends.empty()) continue;
        if (!alarm_armed) arm_alarm();
        enter(ends.empty() && !registered.waits());
        sum();  // while the disk has work again
        bell_within_ns = exchange.deliver(ends, now_ns(), kernel.can_time_out());
        if (!at_once) go_on_registering();
        reap();
    }
    kernel.unmap();
    exchange.leave();
}

// Sums what was read, where it is wanted.
void Ring::State::sum() {
    for (std::size_t number = 0; number < done.size(); ++number) {
        const Move& move = done[number];
        if (!ends[number].whole || move.slice_bytes == 0) continue;
        const iovec& last = move.parts.back();
        const std::size_t count = last.iov_len / move.slice_bytes;
        ends[number].sums.resize(count * CHECKSUM_BYTES);
        checksum(static_cast<const char*>(last.iov_base), nullptr, move.slice_bytes, count, ends[number].sums.data());
    }
    done.clear();
}

void Ring::State::go_on_registering() {
    if (const int refusal = under_way.registered().go_on()) exchange.refused(refusal);
}

void Ring::State::arm_alarm() {
    io_uring_sqe& entry = kernel.next_entry();
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = exchange.alarm();
    entry.poll_events = POLLIN;
    entry.user_data = ALARM;
    alarm_armed = true;
}

// Hands over what is new, and may sleep until something ended or more came into the queue.
void Ring::State::enter(bool sleep) {
    const int inside = under_way.count(), together = std::min(inside / TOGETHER_SHARE, TOGETHER_MAX);
    unsigned least = sleep ? 1 : 0;
    std::int64_t longest_ns = sleep ? bell_within_ns : 0;
    if (sleep && together > 1 && flowing && kernel.can_time_out()) {
        // The alarm counts as an end, so what comes into the queue meanwhile may wait for the timeout, which is short.
        least = unsigned(together);
        longest_ns = longest_ns ? std::min(longest_ns, TOGETHER_NS) : TOGETHER_NS;
    }
    const int error = kernel.enter(least, longest_ns);
    if (!error) refusals = 0;
    if (error == ETIME) flowing = false;
    if (!error || error == EINTR || error == ETIME) return;
    const bool passing = error == EAGAIN || error == EBUSY || error == ENOMEM;
    if (++refusals >= REFUSALS_MAX || !passing) give_back_unsubmitted(error);
    pause_ns(REFUSAL_PAUSE_NS);
}

void Ring::State::give_back_unsubmitted(int error) {
    kernel.take_back([this, error](std::uint64_t who) {
        if (who == ALARM) {
            alarm_armed = false;
        } else {
            end(who, -error);
        }
    });
}

void Ring::State::reap() {
    kernel.reap([this](std::uint64_t who, int result) {
        if (who == ALARM) {
            exchange.silence();
            alarm_armed = false;
        } else {
            end(who, result);
            flowing = true;
        }
    });
}

void Ring::State::end(std::uint64_t entry, int result) {
    Move move;
    End ended;
    if (!under_way.end(entry, result, now_ns(), move, ended)) return;
    ends.push_back(std::move(ended));
    done.push_back(std::move(move));
}

Ring::Ring(int depth, std::size_t piece_bytes) {
    if (depth < 1 || depth > 8192) throw std::invalid_argument("depth must be 1 to 8192");
    if (piece_bytes < 1 || piece_bytes > std::size_t(1) << 30) throw std::invalid_argument("a piece is 1 byte to 1 GiB");
    state_ = std::make_shared<State>(depth, piece_bytes);
    std::thread([state = state_] { state->run(); }).detach();
    const int error = state_->exchange.wait_for_thread();
    if (error) throw std::system_error(error, std::generic_category(), "io_uring");
}

Ring::~Ring() {
    if (state_->exchange.forked()) {
        new std::shared_ptr<State>(std::move(state_));
        return;
    }
    cancel();
    close();
}

void Ring::push(std::vector<Move> moves) {
    if (state_->exchange.forked()) throw std::runtime_error("an io_uring cannot be used after fork()");
    state_->exchange.push(std::move(moves));
}

std::vector<Move> Ring::cancel() {
    if (state_->exchange.forked()) return {};
    return state_->exchange.cancel();
}

std::vector<End> Ring::take() {
    if (state_->exchange.forked()) return {};
    return state_->exchange.take();
}

int Ring::bell() const { return state_->exchange.bell(); }

void Ring::wake() {
    if (!state_->exchange.forked()) state_->exchange.wake();
}

void Ring::register_memory(iovec memory) {
    if (!state_->exchange.forked()) state_->exchange.register_memory(memory);
}

int Ring::refusal() const { return state_->exchange.forked() ? 0 : state_->exchange.refusal(); }

std::uint64_t Ring::registered_moves() const { return state_->under_way.registered_moves(); }

bool Ring::close() {
    if (state_->exchange.forked()) return true;
    const bool left = state_->exchange.close();
    if (left) state_->kernel.close();
    return left;
}

void Ring::after_fork_in_child() {
    if (state_->exchange.forked()) state_->close_descriptors();
}

#else

struct Ring::State {};

Ring::Ring(int, std::size_t) { throw std::system_error(ENOSYS, std::generic_category(), "built without io_uring"); }
Ring::~Ring() = default;
void Ring::push(std::vector<Move>) {}
std::vector<Move> Ring::cancel() { return {}; }
std::vector<End> Ring::take() { return {}; }
int Ring::bell() const { return -1; }
void Ring::wake() {}
void Ring::register_memory(iovec) {}
int Ring::refusal() const { return 0; }
std::uint64_t Ring::registered_moves() const { return 0; }
bool Ring::close() { return true; }
void Ring::after_fork_in_child() {}

#endif

}  // namespace kvtier
