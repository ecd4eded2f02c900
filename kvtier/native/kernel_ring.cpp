#include "kernel_ring.hpp"

#ifdef KVTIER_URING

#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

namespace kvtier {
namespace {

// The same numbers on every architecture, and newer than some C libraries and kernel headers.
constexpr long SETUP_CALL = 425, ENTER_CALL = 426, REGISTER_CALL = 427;
constexpr unsigned SINGLE_ISSUER = 1u << 12, DEFER_TASKRUN = 1u << 13, COOP_TASKRUN = 1u << 8;
constexpr unsigned SETUP_FLAGS[] = {SINGLE_ISSUER | DEFER_TASKRUN, COOP_TASKRUN, 0};  // Linux 6.1, 5.19, 5.4

// io_uring_getevents_arg, which older kernel headers lack; its flag needs Linux 5.11.
struct WaitArgument {
    std::uint64_t signals;
    std::uint32_t signals_bytes, least_wait_us;
    std::uint64_t timeout;
};
constexpr unsigned WAIT_ARGUMENT_FEATURE = 1u << 8, WAIT_ARGUMENT_FLAG = 1u << 3;

// io_uring_rsrc_register and io_uring_rsrc_update2, likewise.
struct TableArgument {
    std::uint32_t place_count, flags;
    std::uint64_t reserved, buffers, tags;
};
struct EntryArgument {
    std::uint32_t place, reserved;
    std::uint64_t buffers, tags;
    std::uint32_t count, reserved_too;
};
constexpr unsigned REGISTER_TABLE = 15, REGISTER_ENTRY = 16;
constexpr std::uint32_t SPARSE = 1;

}  // namespace

int KernelRing::open(unsigned entry_count) {
    unsigned count = 1;
    while (count < entry_count) count *= 2;
    io_uring_params parameters;
    for (unsigned flags : SETUP_FLAGS) {
        std::memset(&parameters, 0, sizeof parameters);
        parameters.flags = flags;
        ring_ = int(syscall(SETUP_CALL, count, &parameters));
        if (ring_ >= 0 || errno != EINVAL) break;
    }
    if (ring_ < 0) return errno;
    if (!(parameters.features & IORING_FEAT_SINGLE_MMAP)) return ENOSYS;
    can_time_out_ = parameters.features & WAIT_ARGUMENT_FEATURE;
    const auto& submit = parameters.sq_off;
    const auto& complete = parameters.cq_off;
    const std::size_t submit_bytes = submit.array + parameters.sq_entries * sizeof(unsigned);
    const std::size_t complete_bytes = complete.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = submit_bytes > complete_bytes ? submit_bytes : complete_bytes;
    entries_bytes_ = parameters.sq_entries * sizeof(io_uring_sqe);
    constexpr int access = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_POPULATE;
    rings_ = mmap(nullptr, rings_bytes_, access, kind, ring_, IORING_OFF_SQ_RING);
    if (rings_ == MAP_FAILED) return errno;
    void* mapped = mmap(nullptr, entries_bytes_, access, kind, ring_, IORING_OFF_SQES);
    entries_ = static_cast<io_uring_sqe*>(mapped);
    if (mapped == MAP_FAILED) return errno;
    madvise(rings_, rings_bytes_, MADV_DONTFORK);
    madvise(entries_, entries_bytes_, MADV_DONTFORK);
    char* base = static_cast<char*>(rings_);
    const auto field = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
    submit_head_ = field(submit.head), submit_tail_ = field(submit.tail), submit_mask_ = field(submit.ring_mask);
    submit_array_ = field(submit.array);
    complete_head_ = field(complete.head), complete_tail_ = field(complete.tail);
    complete_mask_ = field(complete.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(base + complete.cqes);
    return 0;
}

void KernelRing::unmap() {
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, entries_bytes_);
}

void KernelRing::close() {
    const int descriptor = std::exchange(ring_, -1);  // first: a child may be forked here
    if (descriptor >= 0) ::close(descriptor);
}

int KernelRing::make_buffer_table(unsigned place_count) {
    const TableArgument argument{place_count, SPARSE, 0, 0, 0};
    return syscall(REGISTER_CALL, ring_, REGISTER_TABLE, &argument, sizeof argument) < 0 ? errno : 0;
}

int KernelRing::register_buffer(unsigned place, iovec memory) {
    const EntryArgument argument{place, 0, reinterpret_cast<std::uint64_t>(&memory), 0, 1, 0};
    return syscall(REGISTER_CALL, ring_, REGISTER_ENTRY, &argument, sizeof argument) < 0 ? errno : 0;
}

io_uring_sqe& KernelRing::next_entry() {
    const unsigned tail = *submit_tail_, place = tail & *submit_mask_;
    std::memset(&entries_[place], 0, sizeof(io_uring_sqe));
    submit_array_[place] = place;
    store(submit_tail_, tail + 1);
    return entries_[place];
}

int KernelRing::enter(unsigned least, std::int64_t longest_ns) {
    const unsigned waiting = *submit_tail_ - load(submit_head_);
    long answer;
    if (longest_ns) {
        const std::int64_t span[2] = {0, longest_ns};
        const WaitArgument argument{0, 0, 0, reinterpret_cast<std::uint64_t>(span)};
        answer = syscall(ENTER_CALL, ring_, waiting, least, IORING_ENTER_GETEVENTS | WAIT_ARGUMENT_FLAG, &argument,
                         sizeof argument);
    } else {
        answer = syscall(ENTER_CALL, ring_, waiting, least, IORING_ENTER_GETEVENTS, nullptr, 0);
    }
    return answer >= 0 ? 0 : errno;
}

}  // namespace kvtier

#endif
