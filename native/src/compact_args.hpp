// SPDX-License-Identifier: Apache-2.0
// What the loops over a compact state are given.
#pragma once

#include <cstdint>
#include <type_traits>

#include "stochastic.hpp"
#include "update_rules.hpp"

namespace memascend {

// Elements that follow each other in the tensor and in memory, all with one key.
struct CompactArgs {
  std::uint16_t* param;
  void* residual;
  void* mu;
  void* nu;
  float* scales;
  const void* grad;
  std::uint64_t n;
  std::uint64_t first_element;
  RandomKey key;
  RuleConstants constants;
};

// A NaN of bfloat16 is plain as it is: its payload does not reach the lower half.
template <typename Grad>
MEMASCEND_INLINE float load_grad(typename Grad::Storage stored) noexcept {
  const float grad = Grad::load(stored);
  if constexpr (std::is_same_v<Grad, Bfloat16>) return grad;
  return with_plain_nan(grad);
}

}  // namespace memascend
