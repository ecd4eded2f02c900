// Four floats in plain C++, for any CPU. Included by isa_plain.cpp alone, hence the unnamed namespace.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace kvtier {
namespace {

struct Simd {
    static constexpr int LANES = 4;
    static constexpr int TILE_ROWS = 3, TILE_VECTORS = 2;
    typedef float Floats __attribute__((vector_size(16)));
    typedef std::int32_t Words __attribute__((vector_size(16)));

    static Floats set(float x) { return Floats{x, x, x, x}; }
    static Floats add(Floats a, Floats b) { return a + b; }
    static Floats sub(Floats a, Floats b) { return a - b; }
    static Floats mul(Floats a, Floats b) { return a * b; }
    static Floats div(Floats a, Floats b) { return a / b; }
    static Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // two roundings: -ffp-contract=off
    static Floats max(Floats a, Floats b) { return a > b ? a : b; }        // b if either is NaN
    static Floats round(Floats a) {  // exact for |a| < 2^22
        const Floats magic = set(12582912.0f);
        return (a + magic) - magic;
    }
    static Floats scale_by_power(Floats a, Floats n) {  // a * 2^n in two steps, so that n may reach -150
        Floats result = a;
        for (int i = 0; i < 4; ++i) {
            const std::int32_t power = std::isnan(n[i]) ? 0 : std::int32_t(n[i]);
            const std::int32_t half = power >> 1;
            result[i] = result[i] * power_of_two(half) * power_of_two(power - half);
        }
        return result;
    }
    static float first(Floats a) { return a[0]; }
    static float sum(Floats a) { return (a[0] + a[2]) + (a[1] + a[3]); }
    static float largest(Floats a) {
        const float left = a[0] > a[1] ? a[0] : a[1], right = a[2] > a[3] ? a[2] : a[3];
        return left > right ? left : right;
    }

    template <class T>
    static Floats load(const T* from) {
        return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
    }
    template <class T>
    static Floats load(const T* from, int count) {
        Floats x = set(0.0f);
        for (int i = 0; i < count; ++i) x[i] = widen(from[i]);
        return x;
    }
    template <class T>
    static void store(T* to, Floats x) {
        store(to, x, LANES);
    }
    template <class T>
    static void store(T* to, Floats x, int count) {
        for (int i = 0; i < count; ++i) narrow(x[i], to[i]);
    }

    // to[column * stride + row] = from[row][column] for LANES rows and `columns` columns, as fp32.
    template <class T>
    static void transpose(const T* const* from, int columns, float* to, int stride) {
        for (int column = 0; column < columns; ++column) {
            for (int i = 0; i < LANES; ++i) to[column * stride + i] = widen(from[i][column]);
        }
    }

  private:
    static float from_bits(std::uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    static std::uint32_t to_bits(float x) {
        std::uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits;
    }
    static float power_of_two(std::int32_t n) { return from_bits(std::uint32_t(n + 127) << 23); }

    static float widen(float x) { return x; }
    static float widen(bf16 x) { return from_bits(std::uint32_t(x.bits) << 16); }
    static float widen(f16 x) {
        const std::uint32_t sign = std::uint32_t(x.bits & 0x8000) << 16, magnitude = std::uint32_t(x.bits & 0x7fff) << 13;
        if (magnitude >= 0x7c00u << 13) return from_bits(sign | 0x7f800000 | magnitude);  // inf or NaN
        return from_bits(sign | to_bits(from_bits(magnitude) * power_of_two(112)));       // moves the exponent's bias
    }

    static void narrow(float x, float& to) { to = x; }
    static void narrow(float x, bf16& to) {  // to nearest even
        const std::uint32_t bits = to_bits(x);
        to.bits = x != x ? 0x7fc0 : std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static void narrow(float x, f16& to) {  // to nearest even
        const std::uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        std::uint32_t result;
        if (magnitude > 0x7f800000) result = 0x7e00;         // NaN
        else if (magnitude >= 0x477ff000) result = 0x7c00;   // rounds to 2^16 or more: infinity
        else if (magnitude < 0x38800000) {                   // below 2^-14: the adder rounds to multiples of 2^-24
            result = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
        } else {
            result = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
        }
        to.bits = std::uint16_t(sign | result);
    }
};

}  // namespace
}  // namespace kvtier
