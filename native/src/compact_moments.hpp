// SPDX-License-Identifier: Apache-2.0
// How a compact state keeps moments: as floats, or as bytes relative to what no moment of a block
// exceeds.
//
//   mu = +-scale * (x - 2^-15) with x in [2^-15, 2), of which 4 bits are exponent and 3 fraction
//   nu =   scale * (x - 2^-31) with x in [2^-31, 2), of which 5 bits are exponent and 3 fraction
//
// Steps are an eighth of a power of two wide, as moments within a block differ by orders of
// magnitude, and even below the subtracted number, so that zero is a code. A byte is rounded up
// with the probability of the value's distance to the one below, so that its mean is the value;
// but a nu never to zero, since the step is divided by its root.
#pragma once

#include <cmath>

#include "float_formats.hpp"
#include "stochastic.hpp"

namespace memascend {

struct Float32Moment {
  using Storage = float;
  static MEMASCEND_INLINE float load(float stored) noexcept { return stored; }
  static MEMASCEND_INLINE float store(float value, std::uint32_t) noexcept { return value; }
};

struct Bfloat16Moment {
  using Storage = std::uint16_t;
  static MEMASCEND_INLINE float load(std::uint16_t stored) noexcept {
    return Bfloat16::load(stored);
  }
  static MEMASCEND_INLINE std::uint16_t store(float value, std::uint32_t random16) noexcept {
    return bfloat16_stochastic(value, random16);
  }
};

// scale, or NaN if it is not finite, so that a fault is not lost in a code.
MEMASCEND_INLINE float block_scale(float scale) noexcept {
  return scale < float_of(0x7F800000U) ? scale : float_of(0x7FC00000U);
}

MEMASCEND_INLINE float inverse_scale(float scale) noexcept {
  return scale == 0.0F ? 0.0F : 1.0F / scale;
}

// A byte float: the upper bits of a float32 from `kLowest` on, relative to those of kLowest.
template <int Exponent>
struct ByteFloat {
  static constexpr std::uint32_t kBase = static_cast<std::uint32_t>(127 + Exponent) << 3;
  static MEMASCEND_INLINE float lowest() noexcept { return float_of(kBase << 20); }
  static MEMASCEND_INLINE float decode(std::uint32_t code) noexcept {
    return float_of((code + kBase) << 20) - lowest();
  }
  // The code, kBase above it. share is in [0, 1], or NaN with a scale that says so.
  static MEMASCEND_INLINE std::uint32_t encode(float share, std::uint32_t random20) noexcept {
    return (bits_of(share + lowest()) + random20) >> 20;
  }
};
using MuByte = ByteFloat<-15>;
using NuByte = ByteFloat<-31>;

MEMASCEND_INLINE float decode_mu(std::uint8_t code, float scale) noexcept {
  const std::uint32_t byte = code;
  const float magnitude = scale * MuByte::decode(byte & 0x7FU);
  return float_of(bits_of(magnitude) | ((byte << 24) & 0x80000000U));
}

MEMASCEND_INLINE std::uint8_t encode_mu(float value, float inverse,
                                        std::uint32_t random20) noexcept {
  static_assert((MuByte::kBase & 0x7FU) == 0);
  const std::uint32_t bits = bits_of(value);
  const float share = float_of(bits & 0x7FFFFFFFU) * inverse;
  return static_cast<std::uint8_t>((MuByte::encode(share, random20) & 0x7FU) |
                                   ((bits >> 24) & 0x80U));
}

MEMASCEND_INLINE float decode_nu(std::uint8_t code, float scale) noexcept {
  return scale * NuByte::decode(code);
}

MEMASCEND_INLINE std::uint8_t encode_nu(float value, float inverse,
                                        std::uint32_t random20) noexcept {
  const std::uint32_t code = NuByte::encode(value * inverse, random20) - NuByte::kBase;
  return static_cast<std::uint8_t>(code == 0 && value > 0.0F ? 1U : code);
}

}  // namespace memascend
