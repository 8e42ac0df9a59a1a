// SPDX-License-Identifier: Apache-2.0
// By table: slicing by eight (Kounavis and Berry, 2005). By instruction: three independent streams
// hide the three-cycle latency of `crc32`, and their remainders are joined by a multiplication with
// x^(8 * length) modulo the polynomial (as in Adler's crc32c.c, here with our own code).
#include "memascend/checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "memascend/thread_pool.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace memascend {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78U;      // reflected
constexpr std::uint32_t kOne = std::uint32_t{1} << 31;  // the polynomial 1, reflected

using Table = std::array<std::uint32_t, 256>;

constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFFU];
    }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

// a * b modulo the polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1U) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * nbytes) modulo the polynomial.
constexpr std::uint32_t power_of_bytes(std::uint64_t nbytes) noexcept {
  std::uint32_t result = kOne;
  std::uint32_t square = kOne >> 8;  // x^8
  for (; nbytes != 0; nbytes >>= 1) {
    if ((nbytes & 1U) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

std::uint64_t load64(const std::byte* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Large enough that the joins cost nothing, small enough for two threads to share a 1 MiB tile.
constexpr std::uint64_t kParallelChunk = std::uint64_t{256} << 10;

}  // namespace

std::uint32_t crc32c(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed) noexcept {
  static const bool has_instruction = detail::crc32c_has_instruction();
  return has_instruction ? detail::crc32c_instruction(data, nbytes, seed)
                         : detail::crc32c_tables(data, nbytes, seed);
}

std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_nbytes) noexcept {
  return multiply(power_of_bytes(b_nbytes), a) ^ b;
}

// Works through the data in rounds of at most 64 chunks, so that the parts fit on the stack.
std::uint32_t crc32c_parallel(const std::byte* data, std::uint64_t nbytes,
                              std::uint32_t seed) noexcept {
  constexpr std::uint64_t kChunksPerRound = 64;
  constexpr std::uint64_t kRound = kChunksPerRound * kParallelChunk;
  constexpr std::uint32_t kShift = power_of_bytes(kParallelChunk);
  std::uint32_t crc = seed;
  for (std::uint64_t begin = 0; begin < nbytes; begin += kRound) {
    const std::uint64_t length = std::min(kRound, nbytes - begin);
    const std::uint64_t chunks = (length + kParallelChunk - 1) / kParallelChunk;
    std::array<std::uint32_t, kChunksPerRound> parts;
    auto one = [&](std::uint64_t chunk) noexcept {
      const std::uint64_t at = chunk * kParallelChunk;
      parts[chunk] = crc32c(data + begin + at, std::min(kParallelChunk, length - at));
    };
    kernel_pool().parallel_for(chunks, one);
    for (std::uint64_t chunk = 0; chunk + 1 < chunks; ++chunk)
      crc = multiply(kShift, crc) ^ parts[chunk];
    crc = crc32c_combine(crc, parts[chunks - 1], length - (chunks - 1) * kParallelChunk);
  }
  return crc;
}

void crc32c_many(const std::byte* const* data, const std::uint64_t* nbytes, std::uint32_t* out,
                 std::uint64_t count) noexcept {
  auto one = [&](std::uint64_t i) noexcept { out[i] = crc32c(data[i], nbytes[i]); };
  kernel_pool().parallel_for(count, one);
}

namespace detail {

std::uint32_t crc32c_tables(const std::byte* data, std::uint64_t nbytes,
                            std::uint32_t seed) noexcept {
  std::uint32_t crc = ~seed;
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const std::uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (std::size_t byte = 0; byte < 8; ++byte)
      crc ^= kTables[7 - byte][(word >> (8 * byte)) & 0xFFU];
  }
  for (; nbytes > 0; ++data, --nbytes)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*data)) & 0xFFU];
  return ~crc;
}

#if defined(__x86_64__)

bool crc32c_has_instruction() noexcept {
  return __builtin_cpu_supports("sse4.2");
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_instruction(const std::byte* data,
                                                                   std::uint64_t nbytes,
                                                                   std::uint32_t seed) noexcept {
  constexpr std::uint64_t kStream = 8192;
  constexpr std::uint32_t kOneStream = power_of_bytes(kStream);
  constexpr std::uint32_t kTwoStreams = power_of_bytes(2 * kStream);
  std::uint64_t crc = ~seed;
  for (; nbytes >= 3 * kStream; data += 3 * kStream, nbytes -= 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::uint64_t at = 0; at < kStream; at += 8) {
      crc = _mm_crc32_u64(crc, load64(data + at));
      second = _mm_crc32_u64(second, load64(data + kStream + at));
      third = _mm_crc32_u64(third, load64(data + 2 * kStream + at));
    }
    crc = multiply(kTwoStreams, static_cast<std::uint32_t>(crc)) ^
          multiply(kOneStream, static_cast<std::uint32_t>(second)) ^ third;
  }
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = _mm_crc32_u64(crc, load64(data));
  auto low = static_cast<std::uint32_t>(crc);
  for (; nbytes > 0; ++data, --nbytes)
    low = _mm_crc32_u8(low, std::to_integer<unsigned char>(*data));
  return ~low;
}

#else

bool crc32c_has_instruction() noexcept {
  return false;
}

std::uint32_t crc32c_instruction(const std::byte* data, std::uint64_t nbytes,
                                 std::uint32_t seed) noexcept {
  return crc32c_tables(data, nbytes, seed);
}

#endif

}  // namespace detail

}  // namespace memascend
