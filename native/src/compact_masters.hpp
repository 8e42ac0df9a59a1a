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

// The upper 24 bits of a float32, the lowest of them drawn by 8 random bits: the parameter and, as
// a signed number, what its rounding left. With 0x8000 added to the float32 the parameter is its
// upper half and the residual the next byte, but for the highest bit of that: `kFlips` in each byte
// of a word of residuals.
struct ByteMaster {
  static constexpr std::uint32_t kFlips = 0x80808080U;
  // Of a parameter in the upper half, and a flipped residual in bits 8 to 15, whatever is beside
  // it.
  static MEMASCEND_INLINE float load(std::uint32_t param, std::uint32_t residual) noexcept {
    return float_of((param | (residual & 0xFF00U)) - 0x8000U);
  }
  // The same form; what is below is not to be kept.
  static MEMASCEND_INLINE std::uint32_t store(float value, std::uint32_t random8) noexcept {
    return bits_of(value) + (random8 | 0x8000U);
  }
};

}  // namespace memascend
