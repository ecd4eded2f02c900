#include "uring.hpp"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <ctime>
#include <deque>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "checksum.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define KVTIER_URING
#endif

namespace kvtier {

std::int64_t Move::total_bytes() const {
    std::int64_t total = 0;
    for (const iovec& part : parts) total += std::int64_t(part.iov_len);
    return total;
}

#ifdef KVTIER_URING

namespace {

// The same numbers on every architecture, and newer than some C libraries and kernel headers.
constexpr long SETUP_CALL = 425, ENTER_CALL = 426;
constexpr unsigned SINGLE_ISSUER = 1u << 12, DEFER_TASKRUN = 1u << 13, COOP_TASKRUN = 1u << 8;
constexpr unsigned SETUP_FLAGS[] = {SINGLE_ISSUER | DEFER_TASKRUN, COOP_TASKRUN, 0};  // Linux 6.1, 5.19, 5.4
constexpr std::uint64_t BELL = ~std::uint64_t(0);
constexpr int REFUSALS_MAX = 64;
constexpr long REFUSAL_PAUSE_NS = 1'000'000;
constexpr int TOGETHER_SHARE = 4, TOGETHER_MAX = 8;  // of what is under way so much, at most so many, end together
constexpr long TOGETHER_NS = 500'000;                // or what has ended by then

// io_uring_getevents_arg, which older kernel headers lack; its flag needs Linux 5.11.
struct WaitArgument {
    std::uint64_t signals;
    std::uint32_t signals_bytes, least_wait_us;
    std::uint64_t timeout;
};
constexpr unsigned WAIT_ARGUMENT_FEATURE = 1u << 8, WAIT_ARGUMENT_FLAG = 1u << 3;

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void pause_ns(long nanoseconds) {
    const timespec span{0, nanoseconds};
    nanosleep(&span, nullptr);
}

void signal(int event) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(event, &one, sizeof one);
}

unsigned load(const unsigned* value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
void store(unsigned* value, unsigned now) { __atomic_store_n(value, now, __ATOMIC_RELEASE); }

// One move in the kernel; its parts must stay where they are until it has ended.
struct Slot {
    Move move;
    std::int64_t started_ns;
};

}  // namespace

struct Ring::State {
    explicit State(int depth_) : depth(depth_), slots(depth_) {
        for (int slot = depth - 1; slot >= 0; --slot) free.push_back(slot);
    }

    ~State() {
        if (!forked()) close_descriptors();
    }

    // ---- any thread, under the mutex

    const int depth;
    const pid_t owner = getpid();
    std::mutex mutex;
    std::condition_variable fed;     // the ring's thread sleeps on it while nothing is in the kernel
    std::condition_variable set_up;  // the constructor sleeps on it
    std::deque<Move> queue;
    std::vector<End> ends;
    int moving = 0;          // taken from the queue and not among the ends yet
    bool full = false;       // the kernel has `depth` of them
    bool in_kernel = false;  // the ring's thread sleeps there, or is about to
    bool opened = false, stop = false, rung = false, left = false;
    int failure = 0;
    int ring = -1, event = -1, bell = -1;

    bool forked() const { return getpid() != owner; }  // the mutex may be held for ever

    void feed() {
        fed.notify_one();
        if (in_kernel && !full) {
            in_kernel = false;
            signal(event);
        }
    }

    void ring_bell() {
        if (!rung) signal(bell);
        rung = true;
    }

    // ---- the ring's thread alone

    std::vector<Slot> slots;
    std::vector<int> free;
    void* rings = MAP_FAILED;
    io_uring_sqe* entries = static_cast<io_uring_sqe*>(MAP_FAILED);
    std::size_t rings_bytes = 0, entries_bytes = 0;
    unsigned *submit_head, *submit_tail, *submit_mask, *submit_array;
    unsigned *complete_head, *complete_tail, *complete_mask;
    io_uring_cqe* completions;
    bool bell_armed = false, can_time_out = false;
    bool flowing = false;  // something has ended since it last slept in vain
    int refusals = 0;
    const Checksum checksum = checksum_for("auto");
    struct Ended {
        Move move;
        End end;
    };
    std::vector<Ended> done;  // out of the kernel, on their way to the ends

    void run();
    int open();
    void unmap();
    void close_descriptors();
    bool take(std::vector<int>& taken);
    void deliver();
    io_uring_sqe& next_entry();
    void enter_move(int slot);
    void arm_bell();
    void enter(bool sleep);
    void give_back_unsubmitted(int error);
    void reap();
    void end(int slot, int result);
    std::string sums_of(const Move& move) const;
};

int Ring::State::open() {
    unsigned count = 1;
    while (count < unsigned(depth) + 1) count *= 2;  // one more for the bell
    io_uring_params parameters;
    for (unsigned flags : SETUP_FLAGS) {
        std::memset(&parameters, 0, sizeof parameters);
        parameters.flags = flags;
        ring = int(syscall(SETUP_CALL, count, &parameters));
        if (ring >= 0 || errno != EINVAL) break;
    }
    if (ring < 0) return errno;
    if (!(parameters.features & IORING_FEAT_SINGLE_MMAP)) return ENOSYS;
    can_time_out = parameters.features & WAIT_ARGUMENT_FEATURE;
    event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bell = eventfd(0, EFD_CLOEXEC);
    if (event < 0 || bell < 0) return errno;
    const auto& submit = parameters.sq_off;
    const auto& complete = parameters.cq_off;
    const std::size_t submit_bytes = submit.array + parameters.sq_entries * sizeof(unsigned);
    const std::size_t complete_bytes = complete.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
    rings_bytes = submit_bytes > complete_bytes ? submit_bytes : complete_bytes;
    entries_bytes = parameters.sq_entries * sizeof(io_uring_sqe);
    constexpr int access = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_POPULATE;
    rings = mmap(nullptr, rings_bytes, access, kind, ring, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return errno;
    void* mapped = mmap(nullptr, entries_bytes, access, kind, ring, IORING_OFF_SQES);
    entries = static_cast<io_uring_sqe*>(mapped);
    if (mapped == MAP_FAILED) return errno;
    madvise(rings, rings_bytes, MADV_DONTFORK);
    madvise(entries, entries_bytes, MADV_DONTFORK);
    char* base = static_cast<char*>(rings);
    const auto field = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
    submit_head = field(submit.head), submit_tail = field(submit.tail), submit_mask = field(submit.ring_mask);
    submit_array = field(submit.array);
    complete_head = field(complete.head), complete_tail = field(complete.tail);
    complete_mask = field(complete.ring_mask);
    completions = reinterpret_cast<io_uring_cqe*>(base + complete.cqes);
    return 0;
}

void Ring::State::unmap() {
    if (rings != MAP_FAILED) munmap(rings, rings_bytes);
    if (entries != MAP_FAILED) munmap(entries, entries_bytes);
}

void Ring::State::close_descriptors() {
    for (int* held : {&ring, &event, &bell}) {
        const int descriptor = std::exchange(*held, -1);  // first: a child may be forked here
        if (descriptor >= 0) ::close(descriptor);
    }
}

void Ring::State::run() {
    sigset_t signals;
    sigfillset(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // they are other threads' business
    const int error = open();
    {
        std::lock_guard lock(mutex);
        failure = error;
        opened = true;
        set_up.notify_all();
    }
    std::vector<int> taken;
    while (!error && take(taken)) {
        for (int slot : taken) enter_move(slot);
        if (!bell_armed) arm_bell();
        enter(done.empty());
        deliver();  // while the disk has work again
        reap();
    }
    std::lock_guard lock(mutex);
    unmap();
    left = true;
    ring_bell();
}

// Sums what was read and hands it out.
void Ring::State::deliver() {
    for (Ended& ended : done) {
        if (ended.end.whole && ended.move.slice_bytes) ended.end.sums = sums_of(ended.move);
    }
    std::lock_guard lock(mutex);
    in_kernel = false;
    if (done.empty()) return;
    moving -= int(done.size());
    for (Ended& ended : done) ends.push_back(std::move(ended.end));
    done.clear();
    ring_bell();
}

std::string Ring::State::sums_of(const Move& move) const {
    const iovec& last = move.parts.back();
    const std::size_t count = last.iov_len / move.slice_bytes;
    std::string sums(count * CHECKSUM_BYTES, '\0');
    checksum(static_cast<const char*>(last.iov_base), nullptr, move.slice_bytes, count, sums.data());
    return sums;
}

// Waits until there is something to do; false: nothing ever will be.
bool Ring::State::take(std::vector<int>& taken) {
    taken.clear();
    std::unique_lock lock(mutex);
    while (queue.empty() && moving == 0 && !stop) fed.wait(lock);
    if (queue.empty() && moving == 0) return false;
    for (; !queue.empty() && !free.empty(); queue.pop_front(), free.pop_back(), ++moving) {
        taken.push_back(free.back());
        slots[free.back()].move = std::move(queue.front());
    }
    full = free.empty();
    in_kernel = true;
    return true;
}

io_uring_sqe& Ring::State::next_entry() {
    const unsigned tail = *submit_tail, place = tail & *submit_mask;
    std::memset(&entries[place], 0, sizeof(io_uring_sqe));
    submit_array[place] = place;
    store(submit_tail, tail + 1);  // the kernel looks only when it is entered
    return entries[place];
}

void Ring::State::enter_move(int slot) {
    constexpr std::uint8_t codes[] = {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC};
    const Move& move = slots[slot].move;
    slots[slot].started_ns = now_ns();
    io_uring_sqe& entry = next_entry();
    entry.opcode = codes[int(move.operation)];
    entry.fd = move.descriptor;
    entry.user_data = std::uint64_t(slot);
    if (move.operation == Operation::sync) {
        entry.fsync_flags = IORING_FSYNC_DATASYNC;
        return;
    }
    entry.off = move.offset;
    entry.addr = reinterpret_cast<std::uint64_t>(move.parts.data());
    entry.len = unsigned(move.parts.size());
}

void Ring::State::arm_bell() {
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = event;
    entry.poll_events = POLLIN;
    entry.user_data = BELL;
    bell_armed = true;
}

// Hands over what is new, and may sleep until something ended or more came into the queue.
void Ring::State::enter(bool sleep) {
    const unsigned waiting = *submit_tail - load(submit_head);
    const int inside = depth - int(free.size()), together = std::min(inside / TOGETHER_SHARE, TOGETHER_MAX);
    long answer;
    if (sleep && together > 1 && flowing && can_time_out) {
        // The bell counts as an end, so what comes into the queue meanwhile may wait for the timeout, which is short.
        const std::int64_t span[2] = {0, TOGETHER_NS};
        const WaitArgument argument{0, 0, 0, reinterpret_cast<std::uint64_t>(span)};
        answer = syscall(ENTER_CALL, ring, waiting, together, IORING_ENTER_GETEVENTS | WAIT_ARGUMENT_FLAG, &argument,
                         sizeof argument);
    } else {
        answer = syscall(ENTER_CALL, ring, waiting, sleep ? 1 : 0, IORING_ENTER_GETEVENTS, nullptr, 0);
    }
    if (answer >= 0) {
        refusals = 0;
        return;
    }
    const int error = errno;
    if (error == ETIME) flowing = false;
    if (error == EINTR || error == ETIME) return;
    const bool passing = error == EAGAIN || error == EBUSY || error == ENOMEM;
    if (++refusals >= REFUSALS_MAX || !passing) give_back_unsubmitted(error);
    pause_ns(REFUSAL_PAUSE_NS);
}

void Ring::State::give_back_unsubmitted(int error) {
    const unsigned head = load(submit_head);
    for (unsigned place = head; place != *submit_tail; ++place) {
        const std::uint64_t who = entries[submit_array[place & *submit_mask]].user_data;
        if (who == BELL) {
            bell_armed = false;
        } else {
            end(int(who), -error);
        }
    }
    store(submit_tail, head);
}

void Ring::State::reap() {
    unsigned head = *complete_head;
    for (const unsigned tail = load(complete_tail); head != tail; ++head) {
        const io_uring_cqe& completion = completions[head & *complete_mask];
        if (completion.user_data == BELL) {
            std::uint64_t rings;
            [[maybe_unused]] const auto taken = read(event, &rings, sizeof rings);
            bell_armed = false;
        } else {
            end(int(completion.user_data), completion.res);
            flowing = true;
        }
    }
    store(complete_head, head);
}

void Ring::State::end(int slot, int result) {
    free.push_back(slot);
    Slot& ended = slots[slot];
    End end{ended.move.owner, ended.move.tag, result, result == ended.move.total_bytes(), ended.started_ns, now_ns(), {}};
    done.push_back({std::move(ended.move), std::move(end)});
}

Ring::Ring(int depth) {
    if (depth < 1 || depth > 16384) throw std::invalid_argument("depth must be 1 to 16384");
    state_ = std::make_shared<State>(depth);
    std::thread([state = state_] { state->run(); }).detach();
    std::unique_lock lock(state_->mutex);
    state_->set_up.wait(lock, [this] { return state_->opened; });
    if (state_->failure) throw std::system_error(state_->failure, std::generic_category(), "io_uring");
}

Ring::~Ring() {
    if (state_->forked()) {
        new std::shared_ptr<State>(std::move(state_));
        return;
    }
    cancel();
    close();
}

void Ring::push(std::vector<Move> moves) {
    if (state_->forked()) throw std::runtime_error("an io_uring cannot be used after fork()");
    std::lock_guard lock(state_->mutex);
    if (state_->stop) throw std::runtime_error("the io_uring is closed");
    for (Move& move : moves) state_->queue.push_back(std::move(move));
    state_->feed();
}

std::vector<Move> Ring::cancel() {
    if (state_->forked()) return {};
    std::lock_guard lock(state_->mutex);
    std::deque<Move>& queue = state_->queue;
    std::vector<Move> moves(std::move_iterator(queue.begin()), std::move_iterator(queue.end()));
    queue.clear();
    return moves;
}

std::vector<End> Ring::take() {
    if (state_->forked()) return {};
    std::lock_guard lock(state_->mutex);
    state_->rung = false;
    return std::exchange(state_->ends, {});
}

int Ring::bell() const { return state_->bell; }

void Ring::wake() {
    if (state_->forked()) return;
    std::lock_guard lock(state_->mutex);
    state_->ring_bell();
}

bool Ring::close() {
    if (state_->forked()) return true;
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->fed.notify_one();
    if (state_->left) state_->close_descriptors();
    return state_->left;
}

void Ring::after_fork_in_child() {
    if (state_->forked()) state_->close_descriptors();
}

#else

struct Ring::State {};

Ring::Ring(int) { throw std::system_error(ENOSYS, std::generic_category(), "built without io_uring"); }
Ring::~Ring() = default;
void Ring::push(std::vector<Move>) {}
std::vector<Move> Ring::cancel() { return {}; }
std::vector<End> Ring::take() { return {}; }
int Ring::bell() const { return -1; }
void Ring::wake() {}
bool Ring::close() { return true; }
void Ring::after_fork_in_child() {}

#endif

}  // namespace kvtier
