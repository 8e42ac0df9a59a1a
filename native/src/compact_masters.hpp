// SPDX-License-Identifier: Apache-2.0
// How a compact state keeps the master of one element: in the bfloat16 parameter and a residual.
//
// A NaN must be a plain one (see with_plain_nan), which keeps its sign through all roundings.
//
// Nearest rounding with ties away from zero makes the residual alone tell whether the parameter was
// rounded up, so that the master is rebuilt exactly.
#pragma once

#include "float_formats.hpp"
#include "stochastic.hpp"

namespace memascend {

struct SplitMaster {
  using Residual = std::uint16_t;
  static MEMASCEND_INLINE float load(std::uint16_t param, std::uint16_t residual) noexcept {
    // As a signed number the residual is what the rounding left.
    const auto left = static_cast<std::uint32_t>(static_cast<std::int16_t>(residual));
    return float_of((static_cast<std::uint32_t>(param) << 16) + left);
  }
  static MEMASCEND_INLINE void store(float value, std::uint16_t& param,
                                     std::uint16_t& residual) noexcept {
    const std::uint32_t bits = bits_of(value);
    param = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    residual = static_cast<std::uint16_t>(bits);
  }
};

struct BareMaster {
  using Residual = void;
  static MEMASCEND_INLINE float load(std::uint16_t param) noexcept { return Bfloat16::load(param); }
  static MEMASCEND_INLINE std::uint16_t store(float value, std::uint32_t random16) noexcept {
    return bfloat16_stochastic(value, random16);
  }
};

// The upper 24 bits of a float32, the lowest of them drawn by 8 random bits.
struct ByteMaster {
  using Residual = std::uint8_t;
  static MEMASCEND_INLINE float load(std::uint16_t param, std::uint8_t residual) noexcept {
    const auto left = static_cast<std::uint32_t>(static_cast<std::int8_t>(residual));
    return float_of(((static_cast<std::uint32_t>(param) << 8) + left) << 8);
  }
  static MEMASCEND_INLINE void store(float value, std::uint32_t random8, std::uint16_t& param,
                                     std::uint8_t& residual) noexcept {
    const std::uint32_t kept = bits_of(value) + random8;
    param = static_cast<std::uint16_t>((kept + 0x8000U) >> 16);
    residual = static_cast<std::uint8_t>(kept >> 8);
  }
};

}  // namespace memascend
