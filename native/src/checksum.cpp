// SPDX-License-Identifier: Apache-2.0
// The choice among the ways to compute it, the one by tables, and the work of several threads. By
// table: slicing by eight (Kounavis and Berry, 2005).
#include "memascend/checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "crc32c_polynomial.hpp"
#include "crc32c_ways.hpp"
#include "memascend/thread_pool.hpp"

namespace memascend {
namespace {

using crc32c_polynomial::kPolynomial;
using crc32c_polynomial::multiply;
using crc32c_polynomial::power;

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

std::uint64_t load64(const std::byte* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Large enough that the joins cost nothing, small enough for two threads to share a 1 MiB tile.
constexpr std::uint64_t kParallelChunk = std::uint64_t{256} << 10;

detail::Crc32c fastest_way() noexcept {
  std::size_t count = 0;
  const detail::Crc32cWay* ways = detail::crc32c_ways(&count);
  for (std::size_t i = 0; i < count; ++i)
    if (ways[i].is_available()) return ways[i].compute;
  return detail::crc32c_tables;
}

}  // namespace

std::uint32_t crc32c(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed) noexcept {
  static const detail::Crc32c fastest = fastest_way();
  return fastest(data, nbytes, seed);
}

std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_nbytes) noexcept {
  return multiply(power(8 * b_nbytes), a) ^ b;
}

// Works through the data in rounds of at most 64 chunks, so that the parts fit on the stack.
std::uint32_t crc32c_parallel(const std::byte* data, std::uint64_t nbytes,
                              std::uint32_t seed) noexcept {
  constexpr std::uint64_t kChunksPerRound = 64;
  constexpr std::uint64_t kRound = kChunksPerRound * kParallelChunk;
  constexpr std::uint32_t kShift = power(8 * kParallelChunk);
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
                 std::uint64_t count, bool one_thread) noexcept {
  auto one = [&](std::uint64_t i) noexcept { out[i] = crc32c(data[i], nbytes[i]); };
  // To wake the other threads costs as much as a few hundred KiB.
  if (!one_thread && std::accumulate(nbytes, nbytes + count, std::uint64_t{0}) > kParallelChunk)
    return kernel_pool().parallel_for(count, one);
  for (std::uint64_t i = 0; i < count; ++i) one(i);
}

namespace detail {

std::uint32_t crc32c_tables(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed) {
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

#if !defined(__x86_64__)

const Crc32cWay* crc32c_ways(std::size_t* count) {
  *count = 0;
  return nullptr;
}

#endif

}  // namespace detail

}  // namespace memascend
