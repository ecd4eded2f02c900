#include "registered.hpp"

#ifdef KVTIER_URING

#include <algorithm>
#include <cerrno>

namespace kvtier {
namespace {

constexpr unsigned PIECES_MAX = 1 << 14;  // the kernel's bound
constexpr std::size_t TURN_BYTES = 64 << 20, MAPPED_TOGETHER_BYTES = 16 << 20;
constexpr int POPULATE_WRITE = 23;  // of Linux 5.14: C libraries may be older

// Whoever wants this process's map of memory changed waits while pages are pinned, and most of that time goes into
// mapping those that this process has not touched yet: so that is done before, a little at a time.
void map_pages(std::uintptr_t begin, std::uintptr_t end) {
    for (; begin < end; begin += std::min(end - begin, MAPPED_TOGETHER_BYTES)) {
        madvise(reinterpret_cast<void*>(begin), std::min(end - begin, MAPPED_TOGETHER_BYTES), POPULATE_WRITE);
    }
}

}  // namespace

int RegisteredMemory::go_on() {
    if (is_short_ && waits()) {
        waiting_.clear();
        return ENOMEM;
    }
    for (std::size_t left = std::min(piece_bytes_, TURN_BYTES); left != 0 && !waiting_.empty();) {
        iovec& memory = waiting_.front();
        const auto begin = reinterpret_cast<std::uintptr_t>(memory.iov_base);
        const std::size_t bytes = std::min(piece_bytes_, memory.iov_len), more = std::min(left, bytes - mapped_bytes_);
        map_pages(begin + mapped_bytes_, begin + mapped_bytes_ + more);
        left -= more;
        mapped_bytes_ += more;
        if (mapped_bytes_ < bytes) break;
        mapped_bytes_ = 0;
        const int error = bytes ? register_piece(begin, begin + bytes) : 0;
        memory = {reinterpret_cast<void*>(begin + bytes), memory.iov_len - bytes};
        if (error || memory.iov_len == 0) waiting_.pop_front();
        if (error) return error;
    }
    return 0;
}

int RegisteredMemory::register_piece(std::uintptr_t begin, std::uintptr_t end) {
    if (!has_table_) {
        if (const int error = kernel_.make_buffer_table(PIECES_MAX)) return error;
        has_table_ = true;
    }
    const auto place = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                        [](std::uintptr_t at, const Piece& one) { return at < one.end; });
    if (place != pieces_.end() && place->begin == begin && place->end == end) return 0;
    if (place != pieces_.end() && place->begin < end) return EEXIST;
    if (pieces_.size() == PIECES_MAX) return ENOSPC;
    const int number = int(pieces_.size());
    const iovec span{reinterpret_cast<void*>(begin), end - begin};
    if (const int error = kernel_.register_buffer(unsigned(number), span)) {
        is_short_ = error == ENOMEM;
        return error;
    }
    pieces_.insert(place, Piece{begin, end, number});
    return 0;
}

int RegisteredMemory::find(const iovec& span) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(span.iov_base);
    auto after = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                  [](std::uintptr_t at, const Piece& one) { return at < one.begin; });
    if (after == pieces_.begin()) return -1;
    const Piece& piece = *--after;
    return begin + span.iov_len <= piece.end ? piece.number : -1;
}

}  // namespace kvtier

#endif
