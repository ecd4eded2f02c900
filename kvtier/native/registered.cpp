#include "registered.hpp"

#ifdef KVTIER_URING

#include <algorithm>
#include <cerrno>

namespace kvtier {
namespace {

constexpr std::size_t PIECE_BYTES_MAX = std::size_t(1) << 30;  // the kernel's bound
constexpr unsigned PIECES_MAX = 4096;

}  // namespace

int RegisteredMemory::add(const iovec& memory) {
    if (is_short_) return ENOMEM;
    if (!has_table_) {
        if (const int error = kernel_.make_buffer_table(PIECES_MAX)) return error;
        has_table_ = true;
    }
    const auto first = reinterpret_cast<std::uintptr_t>(memory.iov_base), end = first + memory.iov_len;
    for (std::uintptr_t begin = first; begin < end; begin += PIECE_BYTES_MAX) {
        const Piece piece{begin, std::min(end, begin + PIECE_BYTES_MAX), int(pieces_.size())};
        const auto place = std::upper_bound(pieces_.begin(), pieces_.end(), piece.begin,
                                            [](std::uintptr_t at, const Piece& one) { return at < one.end; });
        if (place != pieces_.end() && place->begin == piece.begin && place->end == piece.end) continue;
        if (place != pieces_.end() && place->begin < piece.end) return EEXIST;
        if (pieces_.size() == PIECES_MAX) return ENOSPC;
        const iovec span{reinterpret_cast<void*>(piece.begin), piece.end - piece.begin};
        if (const int error = kernel_.register_buffer(unsigned(piece.number), span)) {
            is_short_ = error == ENOMEM;
            return error;
        }
        pieces_.insert(place, piece);
    }
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
