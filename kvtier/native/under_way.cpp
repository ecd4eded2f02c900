#include "under_way.hpp"

#ifdef KVTIER_URING

#include <utility>

namespace kvtier {
namespace {

constexpr std::uint8_t READ_CODE = 22, WRITE_CODE = 23;  // of Linux 5.6: kernel headers may be older

}  // namespace

UnderWay::UnderWay(KernelRing& kernel, int depth, std::size_t piece_bytes)
    : kernel_(kernel), registered_(kernel, piece_bytes), depth_(depth), slots_(depth) {
    for (int slot = depth - 1; slot >= 0; --slot) free_.push_back(slot);
}

// As the kernel would have said it of a move in one entry: what has moved from its first byte on, or an error.
int UnderWay::Slot::result() const {
    if (entries == 1 || results[0] != int(move.parts[0].iov_len)) return results[0];
    return results[1] < 0 ? results[1] : results[0] + results[1];
}

void UnderWay::begin(Move given, std::int64_t now_ns) {
    const int slot = free_.back();
    free_.pop_back();
    slots_[slot] = {std::move(given), now_ns, 1, 1, {}};
    const Move& move = slots_[slot].move;
    const bool apart = move.operation != Operation::sync && !move.parts.empty() && move.parts.size() <= PARTS_MAX &&
                       registered_.find(move.parts.back()) >= 0;
    if (!apart) return enter_whole(slot);
    const int count = slots_[slot].entries = slots_[slot].left = int(move.parts.size());
    std::uint64_t offset = move.offset;
    for (int number = 0; number < count; ++number) {
        enter_part(slot, number, offset);
        offset += move.parts[number].iov_len;
    }
    ++registered_moves_;
}

bool UnderWay::end(std::uint64_t entry, int result, std::int64_t now_ns, Move& move, End& end) {
    const int number = int(entry / PARTS_MAX);
    Slot& slot = slots_[number];
    slot.results[entry % PARTS_MAX] = result;
    if (--slot.left != 0) return false;
    free_.push_back(number);
    const int whole = slot.result();
    end = {slot.move.owner, slot.move.tag, whole, whole == slot.move.total_bytes(), slot.started_ns, now_ns, {}};
    move = std::move(slot.move);
    return true;
}

void UnderWay::enter_whole(int slot) {
    constexpr std::uint8_t codes[] = {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC};
    const Move& move = slots_[slot].move;
    io_uring_sqe& entry = kernel_.next_entry();
    entry.opcode = codes[int(move.operation)];
    entry.fd = move.descriptor;
    entry.user_data = std::uint64_t(slot) * PARTS_MAX;
    if (move.operation == Operation::sync) {
        entry.fsync_flags = IORING_FSYNC_DATASYNC;
        return;
    }
    entry.off = move.offset;
    entry.addr = reinterpret_cast<std::uint64_t>(move.parts.data());
    entry.len = unsigned(move.parts.size());
}

void UnderWay::enter_part(int slot, int number, std::uint64_t offset) {
    const Move& move = slots_[slot].move;
    const iovec& part = move.parts[number];
    const bool reads = move.operation == Operation::read;
    const int piece = registered_.find(part);
    io_uring_sqe& entry = kernel_.next_entry();
    entry.opcode = piece < 0 ? (reads ? READ_CODE : WRITE_CODE) : reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    entry.fd = move.descriptor;
    entry.user_data = std::uint64_t(slot) * PARTS_MAX + std::uint64_t(number);
    entry.off = offset;
    entry.addr = reinterpret_cast<std::uint64_t>(part.iov_base);
    entry.len = unsigned(part.iov_len);
    if (piece >= 0) entry.buf_index = std::uint16_t(piece);
}

}  // namespace kvtier

#endif
