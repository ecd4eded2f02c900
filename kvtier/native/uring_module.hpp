// What uring_module.cpp adds to kvtier._native.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void add_uring(nanobind::module_& module);

}  // namespace kvtier
