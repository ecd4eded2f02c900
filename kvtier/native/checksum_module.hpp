// What checksum_module.cpp adds to kvtier._native.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void add_checksums(nanobind::module_& module);

}  // namespace kvtier
