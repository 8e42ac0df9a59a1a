// SPDX-License-Identifier: Apache-2.0
// What the binding files share. Bindings check arguments, release the GIL and convert; nothing
// else.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "memascend/kernels.hpp"

namespace memascend {

namespace py = pybind11;

void bind_arena(py::module_& module);
void bind_io(py::module_& module);
void bind_kernels(py::module_& module);
void bind_optimizer(py::module_& module);

// Addresses travel as integers: they come from leases and from jax arrays alike.
template <typename T>
T* pointer(std::uintptr_t address, const char* what) {
  if (address == 0) throw py::value_error(std::string(what) + " is address 0");
  if (address % alignof(T) != 0)
    throw py::value_error(std::string(what) + " is not aligned to its type");
  return reinterpret_cast<T*>(address);
}

inline void* typed_pointer(std::uintptr_t address, FloatType type, const char* what) {
  if (type == FloatType::kFloat32) return pointer<float>(address, what);
  return pointer<std::uint16_t>(address, what);
}

// Seconds of a Python caller, cut to what the clock can hold.
inline std::chrono::nanoseconds duration_of(double seconds) {
  constexpr double kLongest = 1e9;
  const double bounded = seconds < kLongest ? (seconds > 0 ? seconds : 0) : kLongest;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(bounded * 1e9));
}

}  // namespace memascend
