// SPDX-License-Identifier: Apache-2.0
// Polynomials over GF(2) modulo that of CRC-32C, reflected: the top bit is the coefficient of 1.
#pragma once

#include <cstdint>

namespace memascend::crc32c_polynomial {

inline constexpr std::uint32_t kPolynomial = 0x82F63B78U;
inline constexpr std::uint32_t kOne = std::uint32_t{1} << 31;

// a * b.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1U) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^bits. To append n bytes to what has the checksum c multiplies c by x^(8 * n).
constexpr std::uint32_t power(std::uint64_t bits) noexcept {
  std::uint32_t result = kOne;
  std::uint32_t square = kOne >> 1;
  for (; bits != 0; bits >>= 1) {
    if ((bits & 1U) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

}  // namespace memascend::crc32c_polynomial
