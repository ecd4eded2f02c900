// What attend.hpp asks of a matrix unit, for CPUs without one. isa_amx.cpp includes matrix_amx.hpp in its place.
#pragma once

namespace kvtier {
namespace {

struct MatrixUnit {
    static constexpr bool PRESENT = false;
    struct Claim {};
};

}  // namespace
}  // namespace kvtier
