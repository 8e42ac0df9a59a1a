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

#include <algorithm>
#include <cstdint>

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

// A byte float: the upper bits of a float32 from that of `kLowest` on, relative to those. A byte is
// taken from a word, and put into one, by shifts: bits 20 to 27 of a float32 are those of the code
// above kBase, whose own bits lie above.
template <int Exponent>
struct ByteFloat {
  static constexpr std::uint32_t kBase = static_cast<std::uint32_t>(127 + Exponent) << 23;
  static MEMASCEND_INLINE float lowest() noexcept { return float_of(kBase); }
};

struct MuByte : ByteFloat<-15> {
  static_assert((kBase & 0x07FFFFFFU) == 0);

  // What byte `Byte` of a word stands for, by its scale.
  template <int Byte>
  static MEMASCEND_INLINE float take(std::uint32_t word) noexcept {
    const float x = float_of((shifted<8 * Byte, 20>(word) & 0x07F00000U) | kBase);
    return float_of(bits_of(x - lowest()) | (shifted<8 * Byte + 7, 31>(word) & 0x80000000U));
  }

  // A word of that byte and zeros. |value| * inverse is at most 1, or NaN with a scale that says
  // so. random: a byte_draw.
  template <int Byte>
  static MEMASCEND_INLINE std::uint32_t put(float value, float inverse,
                                            std::uint32_t random) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t code = bits_of(float_of(bits & 0x7FFFFFFFU) * inverse + lowest()) + random;
    return (shifted<20, 8 * Byte>(code) & (0x7FU << 8 * Byte)) |
           (shifted<31, 8 * Byte + 7>(bits) & (0x80U << 8 * Byte));
  }
};

// x itself, of which `lowest` is subtracted only where that matters: see NuBlock.
struct NuByte : ByteFloat<-31> {
  static_assert((kBase & 0x0FFFFFFFU) == 0);
  static constexpr std::uint32_t kUnit = 1U << 20;

  template <int Byte>
  static MEMASCEND_INLINE float take(std::uint32_t word) noexcept {
    return float_of((shifted<8 * Byte, 20>(word) & 0x0FF00000U) | kBase);
  }

  // x in [2^-31, 2), value is zero with the lowest x only.
  template <int Byte>
  static MEMASCEND_INLINE std::uint32_t put(float x, float value, std::uint32_t random) noexcept {
    const std::uint32_t code = bits_of(x) + random;
    // The bits of what is neither zero nor a denormal are more than a unit of the code.
    const std::uint32_t kept = std::max(code, std::min(bits_of(value), kUnit));
    return shifted<20, 8 * Byte>(kept) & (0xFFU << 8 * Byte);
  }
};

// The lowest 20 of 32 random bits, less NuByte::kBase: a sum of the bits of an x and these is the
// code in place, without the bits above it. Those of mu are cut off anyway. Both moments of an
// element are rounded by the same bits, in the same direction, so that their ratio varies less.
MEMASCEND_INLINE std::uint32_t byte_draw(std::uint32_t drawn) noexcept {
  return (drawn & 0xFFFFFU) | (0U - NuByte::kBase);
}

}  // namespace memascend
