// Masked loads and stores are hidden from sanitizers: in their builds the same bytes are touched one by one before, in
// every other build these do nothing. Loads and stores of matrix tiles stay unseen.
#pragma once

namespace kvtier {
namespace {

template <class T>
inline void reads([[maybe_unused]] const T* from, [[maybe_unused]] long count) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const volatile char* bytes = reinterpret_cast<const volatile char*>(from);
    for (long i = 0; i < count * long(sizeof(T)); ++i) (void)bytes[i];
#endif
}

template <class T>
inline void writes([[maybe_unused]] T* to, [[maybe_unused]] long count) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    volatile char* bytes = reinterpret_cast<volatile char*>(to);
    for (long i = 0; i < count * long(sizeof(T)); ++i) bytes[i] = 0;
#endif
}

}  // namespace
}  // namespace kvtier
