#include "exchange.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <utility>

#include <sys/eventfd.h>

namespace kvtier {
namespace {

// The bell is held back while so many wait for each that has ended: what ended then hears of it later by at most half
// of what the queue behind it still takes. And for so long at most, should the disk hang.
constexpr std::size_t WAITING_FOR_EACH = 2;
constexpr std::int64_t HELD_NS = 10'000'000;

void signal(int event) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(event, &one, sizeof one);
}

}  // namespace

int Exchange::open() {
    alarm_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bell_ = eventfd(0, EFD_CLOEXEC);
    return alarm_ < 0 || bell_ < 0 ? errno : 0;
}

void Exchange::close_descriptors() {
    for (int* held : {&alarm_, &bell_}) {
        const int descriptor = std::exchange(*held, -1);  // first: a child may be forked here
        if (descriptor >= 0) ::close(descriptor);
    }
}

void Exchange::push(std::vector<Move> moves) {
    std::lock_guard lock(mutex_);
    if (stop_) throw std::runtime_error("the io_uring is closed");
    queue_.insert(queue_.end(), std::move_iterator(moves.begin()), std::move_iterator(moves.end()));
    fed_.notify_one();
    if (std::exchange(sleeps_, false)) signal(alarm_);
}

std::vector<Move> Exchange::cancel() {
    std::lock_guard lock(mutex_);
    std::vector<Move> moves(std::move_iterator(queue_.begin()), std::move_iterator(queue_.end()));
    queue_.clear();
    return moves;
}

std::vector<End> Exchange::take() {
    std::lock_guard lock(mutex_);
    rung_ = false;
    return std::exchange(ends_, {});
}

void Exchange::wake() {
    std::lock_guard lock(mutex_);
    ring_bell();
}

void Exchange::register_memory(iovec memory) {
    std::lock_guard lock(mutex_);
    memories_.push_back(memory);
    fed_.notify_one();
    if (std::exchange(sleeps_, false)) signal(alarm_);
}

int Exchange::refusal() {
    std::lock_guard lock(mutex_);
    return refusal_;
}

void Exchange::refused(int error) {
    std::lock_guard lock(mutex_);
    refusal_ = error;
    ring_bell();
}

bool Exchange::close() {
    std::lock_guard lock(mutex_);
    stop_ = true;
    fed_.notify_one();
    if (left_) close_descriptors();
    return left_;
}

int Exchange::wait_for_thread() {
    std::unique_lock lock(mutex_);
    begun_.wait(lock, [this] { return has_begun_; });
    return failure_;
}

void Exchange::begun(int failure) {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    has_begun_ = true;
    begun_.notify_all();
}

bool Exchange::take_work(std::vector<Move>& moves, std::size_t room, std::vector<iovec>& memories, bool goes_on) {
    moves.clear();
    std::unique_lock lock(mutex_);
    fed_.wait(lock, [this, goes_on] {
        return goes_on || !queue_.empty() || moving_ != 0 || !memories_.empty() || stop_;
    });
    memories = std::exchange(memories_, {});
    if (queue_.empty() && moving_ == 0) return !stop_;
    const auto end = queue_.begin() + std::ptrdiff_t(std::min(room, queue_.size()));
    moves.assign(std::move_iterator(queue_.begin()), std::move_iterator(end));
    queue_.erase(queue_.begin(), end);
    moving_ += moves.size();
    sleeps_ = moves.size() < room;
    return true;
}

std::int64_t Exchange::deliver(std::vector<End>& ends, std::int64_t now_ns, bool can_time_out) {
    std::lock_guard lock(mutex_);
    sleeps_ = false;
    moving_ -= ends.size();
    ends_.insert(ends_.end(), std::move_iterator(ends.begin()), std::move_iterator(ends.end()));
    ends.clear();
    if (ends_.empty() || rung_) return 0;
    if (held_since_ns_ == 0) held_since_ns_ = now_ns;
    const std::int64_t left_ns = held_since_ns_ + HELD_NS - now_ns;
    const bool comes_again = can_time_out && moving_ != 0;  // though the queue be cancelled
    if (comes_again && left_ns > 0 && ends_.size() * WAITING_FOR_EACH < queue_.size()) return left_ns;
    ring_bell();
    return 0;
}

void Exchange::silence() {
    std::uint64_t rings;
    [[maybe_unused]] const auto taken = read(alarm_, &rings, sizeof rings);
}

void Exchange::leave() {
    std::lock_guard lock(mutex_);
    left_ = true;
    signal(bell_);  // though it may have rung: whoever waits for the end need not take what has ended
}

void Exchange::ring_bell() {
    held_since_ns_ = 0;
    if (!rung_) signal(bell_);
    rung_ = true;
}

}  // namespace kvtier
