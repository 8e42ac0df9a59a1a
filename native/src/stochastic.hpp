// SPDX-License-Identifier: Apache-2.0
// Random bits by counter: a hash of a key and an element's position, so that every element can be
// drawn for alone and in any order. Source of the idea: Salmon et al., Parallel Random Numbers: As
// Easy as 1, 2, 3 (SC 2011); of the mixer: Wellons' lowbias32, here keyed between its two rounds
// too, and the finaliser of splitmix64 for keys.
#pragma once

#include <cstdint>

#include "float_formats.hpp"

namespace memascend {

struct RandomKey {
  std::uint32_t first;
  std::uint32_t second;
};

constexpr MEMASCEND_INLINE std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// The key for the elements that share the upper half of their position.
MEMASCEND_INLINE RandomKey random_key_of(std::uint64_t key, std::uint64_t first_element) noexcept {
  const std::uint64_t mixed = mix64(mix64(key) ^ (first_element >> 32));
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}

// 32 random bits for the element with this lower half of its position.
MEMASCEND_INLINE std::uint32_t random_bits(RandomKey key, std::uint32_t element) noexcept {
  std::uint32_t x = (element ^ key.first) * 0x7FEB352DU;
  x = (x ^ (x >> 16) ^ key.second) * 0x846CA68BU;
  return x ^ (x >> 16);
}

// More bits of the same 32: with any half of those fixed, their upper half takes every value.
MEMASCEND_INLINE std::uint32_t random_again(std::uint32_t random) noexcept {
  return random * 0x9E3779B1U;
}

// How many of n elements from `first` on share the upper half of their position with it.
MEMASCEND_INLINE std::uint64_t until_next_key(std::uint64_t first, std::uint64_t n) noexcept {
  const std::uint64_t left = (std::uint64_t{1} << 32) - (first & 0xFFFFFFFFU);
  return n < left ? n : left;
}

// value, or the NaN that no rounding below can carry out of: its lower half is zero.
MEMASCEND_INLINE float with_plain_nan(float value) noexcept {
  return value == value ? value : float_of(0x7FC00000U);
}

// The upper half of value, one more in magnitude if its lower half and 16 random bits carry. inf
// and a plain NaN stay what they are.
MEMASCEND_INLINE std::uint16_t bfloat16_stochastic(float value, std::uint32_t random16) noexcept {
  return static_cast<std::uint16_t>((bits_of(value) + random16) >> 16);
}

}  // namespace memascend
