// SPDX-License-Identifier: Apache-2.0
// By instruction: three independent streams hide the three-cycle latency of `crc32`, and their
// remainders are joined by a carry-less multiplication (as in Adler's crc32c.c, here with our own
// code). By folding: vectors run along the data, each multiplied by a power of x modulo the
// polynomial before the bytes that many bits further are added (Gopal et al., "Fast CRC Computation
// for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009, with vectors of 32 bytes).
#include "crc32c_ways.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "crc32c_polynomial.hpp"

// Functions with attributes, not files with flags: see multi_isa.hpp.
#define MEMASCEND_STREAMS __attribute__((target("sse4.2,pclmul")))
#define MEMASCEND_FOLDING __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))

namespace memascend::detail {
namespace {

using crc32c_polynomial::power;

constexpr std::uint64_t kQuarterBytes = std::uint64_t{64} << 10;

bool has_streams() {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

bool has_folding() {
  return has_streams() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}

std::uint64_t load64(const std::byte* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// The running checksum `crc` with `nbytes` zero bytes appended; `kShift` is x^(8 * nbytes - 33):
// the product of reflected polynomials carries one factor x, `crc32` of it 32 more.
template <std::uint32_t kShift>
MEMASCEND_STREAMS std::uint64_t shifted(std::uint64_t crc) noexcept {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                           _mm_cvtsi64_si128(static_cast<long long>(kShift)), 0);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

// Works through as many times three streams of `kStream` bytes as there are.
template <std::uint64_t kStream>
MEMASCEND_STREAMS std::uint64_t three_streams(std::uint64_t crc, const std::byte*& data,
                                              std::uint64_t& nbytes) noexcept {
  for (; nbytes >= 3 * kStream; data += 3 * kStream, nbytes -= 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::uint64_t at = 0; at < kStream; at += 8) {
      crc = _mm_crc32_u64(crc, load64(data + at));
      second = _mm_crc32_u64(second, load64(data + kStream + at));
      third = _mm_crc32_u64(third, load64(data + 2 * kStream + at));
    }
    crc = shifted<power(8 * 2 * kStream - 33)>(crc) ^ shifted<power(8 * kStream - 33)>(second) ^
          third;
  }
  return crc;
}

// `crc` is the running value, without the inversions at both ends.
MEMASCEND_STREAMS std::uint64_t stream(std::uint64_t crc, const std::byte* data,
                                       std::uint64_t nbytes) noexcept {
  crc = three_streams<8192>(crc, data, nbytes);
  crc = three_streams<256>(crc, data, nbytes);
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = _mm_crc32_u64(crc, load64(data));
  auto low = static_cast<std::uint32_t>(crc);
  for (; nbytes > 0; ++data, --nbytes)
    low = _mm_crc32_u8(low, std::to_integer<unsigned char>(*data));
  return low;
}

MEMASCEND_STREAMS std::uint32_t crc32c_streams(const std::byte* data, std::uint64_t nbytes,
                                               std::uint32_t seed) {
  return ~static_cast<std::uint32_t>(stream(~seed, data, nbytes));
}

// Multiplies both halves of a lane of 128 bits by x^`kBits`: the first half holds the higher
// powers, and each product carries one factor x, which the constants leave out.
template <std::uint64_t kBits>
constexpr std::uint64_t kFirstHalf = std::uint64_t{power(kBits + 64 - 1)} << 32;
template <std::uint64_t kBits>
constexpr std::uint64_t kSecondHalf = std::uint64_t{power(kBits - 1)} << 32;

template <std::uint64_t kBits>
MEMASCEND_FOLDING __m256i folded(__m256i value, __m256i onto) noexcept {
  const __m256i shift = _mm256_set_epi64x(
      static_cast<long long>(kSecondHalf<kBits>), static_cast<long long>(kFirstHalf<kBits>),
      static_cast<long long>(kSecondHalf<kBits>), static_cast<long long>(kFirstHalf<kBits>));
  return _mm256_xor_si256(onto, _mm256_xor_si256(_mm256_clmulepi64_epi128(value, shift, 0x00),
                                                 _mm256_clmulepi64_epi128(value, shift, 0x11)));
}

MEMASCEND_FOLDING __m128i folded_lane(__m128i value, __m128i onto) noexcept {
  const __m128i shift = _mm_set_epi64x(static_cast<long long>(kSecondHalf<128>),
                                       static_cast<long long>(kFirstHalf<128>));
  return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(value, shift, 0x00),
                                           _mm_clmulepi64_si128(value, shift, 0x11)));
}

MEMASCEND_FOLDING __m256i load256(const std::byte* data) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

// The remainder of two neighbouring vectors, as a running value.
MEMASCEND_FOLDING std::uint64_t reduced(__m256i first, __m256i second) noexcept {
  const __m256i both = folded<256>(first, second);
  const __m128i lane = folded_lane(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const std::uint64_t crc = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(lane)));
  return _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_extract_epi64(lane, 1)));
}

// A running value goes into the first four bytes that follow.
MEMASCEND_FOLDING __m256i begun(std::uint64_t crc, const std::byte* data) noexcept {
  return _mm256_xor_si256(load256(data),
                          _mm256_setr_epi32(static_cast<int>(crc), 0, 0, 0, 0, 0, 0, 0));
}

// One core reads memory a fifth faster at four places than at one; docs/experiment_log.md, "CRC32C
// and the memory". Works through as many times four quarters of `kQuarter` bytes as there are.
template <std::uint64_t kQuarter>
MEMASCEND_FOLDING std::uint64_t four_quarters(std::uint64_t crc, const std::byte*& data,
                                              std::uint64_t& nbytes) noexcept {
  constexpr std::uint64_t kLine = 64;
  for (; nbytes >= 4 * kQuarter; data += 4 * kQuarter, nbytes -= 4 * kQuarter) {
    __m256i first[4];
    __m256i second[4];
    for (std::uint64_t k = 0; k < 4; ++k) {
      first[k] = begun(k == 0 ? crc : 0, data + k * kQuarter);
      second[k] = load256(data + k * kQuarter + 32);
    }
    for (std::uint64_t at = kLine; at < kQuarter; at += kLine)
      for (std::uint64_t k = 0; k < 4; ++k) {
        first[k] = folded<8 * kLine>(first[k], load256(data + k * kQuarter + at));
        second[k] = folded<8 * kLine>(second[k], load256(data + k * kQuarter + at + 32));
      }
    crc = shifted<power(8 * 3 * kQuarter - 33)>(reduced(first[0], second[0])) ^
          shifted<power(8 * 2 * kQuarter - 33)>(reduced(first[1], second[1])) ^
          shifted<power(8 * kQuarter - 33)>(reduced(first[2], second[2])) ^
          reduced(first[3], second[3]);
  }
  return crc;
}

// Works through as many steps of four neighbouring vectors as there are.
MEMASCEND_FOLDING std::uint64_t four_vectors(std::uint64_t crc, const std::byte*& data,
                                             std::uint64_t& nbytes) noexcept {
  constexpr std::uint64_t kStep = 4 * sizeof(__m256i);
  if (nbytes < 2 * kStep) return crc;
  __m256i a = begun(crc, data);
  __m256i b = load256(data + 32);
  __m256i c = load256(data + 64);
  __m256i d = load256(data + 96);
  for (data += kStep, nbytes -= kStep; nbytes >= kStep; data += kStep, nbytes -= kStep) {
    a = folded<8 * kStep>(a, load256(data));
    b = folded<8 * kStep>(b, load256(data + 32));
    c = folded<8 * kStep>(c, load256(data + 64));
    d = folded<8 * kStep>(d, load256(data + 96));
  }
  return reduced(folded<512>(a, c), folded<512>(b, d));
}

MEMASCEND_FOLDING std::uint32_t crc32c_folding(const std::byte* data, std::uint64_t nbytes,
                                               std::uint32_t seed) {
  std::uint64_t crc = ~seed;
  crc = four_quarters<kQuarterBytes>(crc, data, nbytes);
  crc = four_vectors(crc, data, nbytes);
  return ~static_cast<std::uint32_t>(stream(crc, data, nbytes));
}

constexpr Crc32cWay kWays[] = {{"vpclmulqdq", has_folding, crc32c_folding},
                               {"sse4.2", has_streams, crc32c_streams}};

}  // namespace

const Crc32cWay* crc32c_ways(std::size_t* count) {
  *count = sizeof kWays / sizeof kWays[0];
  return kWays;
}

}  // namespace memascend::detail

#endif
