// SPDX-License-Identifier: Apache-2.0
// Conversions of single elements, written without branches so that loops over them vectorise, and
// without denormal intermediates so that they hold while denormals are flushed.
#pragma once

#include <cstdint>
#include <cstring>

#define MEMASCEND_INLINE inline __attribute__((always_inline))

namespace memascend {

MEMASCEND_INLINE float float_of(std::uint32_t bits) noexcept {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

MEMASCEND_INLINE std::uint32_t bits_of(float value) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// x with bit From where bit To is.
template <int From, int To>
MEMASCEND_INLINE std::uint32_t shifted(std::uint32_t x) noexcept {
  if constexpr (From < To) return x << (To - From);
  return x >> (From < To ? 0 : From - To);
}

struct Float32 {
  using Storage = float;
  static MEMASCEND_INLINE float load(float value) noexcept { return value; }
  static MEMASCEND_INLINE float store(float value) noexcept { return value; }
};

struct Bfloat16 {
  using Storage = std::uint16_t;
  static MEMASCEND_INLINE float load(std::uint16_t half) noexcept {
    return float_of(static_cast<std::uint32_t>(half) << 16);
  }
  // Nearest, ties away from zero: add half a unit to the magnitude and cut. The carry into the
  // exponent is the right rounding there too. A NaN would carry into the sign: cut it, keep it
  // quiet.
  static MEMASCEND_INLINE std::uint16_t store(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x8000U) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x0040U;
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    return static_cast<std::uint16_t>(is_nan ? quiet : rounded);
  }
};

struct Float16 {
  using Storage = std::uint16_t;
  // A denormal half is a normal float32: its mantissa is placed under the exponent of 2^-14 and
  // the implicit one subtracted.
  static MEMASCEND_INLINE float load(std::uint16_t half) noexcept {
    const std::uint32_t sign = (static_cast<std::uint32_t>(half) & 0x8000U) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half) & 0x7FFFU;
    const std::uint32_t normal = (magnitude << 13) + (112U << 23);
    const std::uint32_t special = normal + (112U << 23);  // inf and nan keep the top exponent
    const float smallest_normal = float_of(113U << 23);
    const std::uint32_t denormal =
        bits_of(float_of((magnitude << 13) + (113U << 23)) - smallest_normal);
    const std::uint32_t finite = magnitude < 0x0400U ? denormal : normal;
    return float_of(sign | (magnitude >= 0x7C00U ? special : finite));
  }
  // Nearest, ties to even. Below 2^-14 the addition of 0.5 lets the float32 adder do the rounding.
  static MEMASCEND_INLINE std::uint16_t store(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    const std::uint32_t odd = (magnitude >> 13) & 1U;
    const std::uint32_t normal = (magnitude - (112U << 23) + 0x0FFFU + odd) >> 13;
    const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
    const std::uint32_t special = magnitude > 0x7F800000U ? 0x7E00U : 0x7C00U;
    const std::uint32_t finite = magnitude < (113U << 23) ? denormal : normal;
    const std::uint32_t half = magnitude >= (143U << 23) ? special : finite;
    return static_cast<std::uint16_t>(sign | half);
  }
};

}  // namespace memascend
