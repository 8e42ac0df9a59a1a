// SPDX-License-Identifier: Apache-2.0
#include "memascend/checksum.hpp"

#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "crc32c_ways.hpp"
#include "memascend/thread_pool.hpp"

using namespace memascend;

namespace {

std::vector<std::byte> random_bytes(std::size_t count) {
  std::mt19937 random(3);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// The definition, bit by bit.
std::uint32_t slow(const std::byte* data, std::size_t count) {
  std::uint32_t crc = ~0U;
  for (std::size_t i = 0; i < count; ++i) {
    crc ^= static_cast<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

// What this processor offers beside the tables.
std::vector<detail::Crc32cWay> ways() {
  std::size_t count = 0;
  const detail::Crc32cWay* all = detail::crc32c_ways(&count);
  std::vector<detail::Crc32cWay> found;
  for (std::size_t i = 0; i < count; ++i)
    if (all[i].is_available()) found.push_back(all[i]);
  return found;
}

void check_against_tables(const std::byte* data, std::size_t count, std::uint32_t seed) {
  const std::uint32_t expected = detail::crc32c_tables(data, count, seed);
  for (const detail::Crc32cWay& way : ways()) {
    const std::uint32_t got = way.compute(data, count, seed);
    if (got != expected) std::printf("      %s, %zu bytes\n", way.name, count);
    CHECK_EQUAL(got, expected);
  }
}

}  // namespace

TEST(known_values_of_rfc_3720) {
  std::vector<std::byte> bytes(32, std::byte{0});
  CHECK_EQUAL(crc32c(bytes.data(), 32), 0x8A9136AAU);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xFF});
  CHECK_EQUAL(crc32c(bytes.data(), 32), 0x62A8AB43U);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  CHECK_EQUAL(crc32c(bytes.data(), 32), 0x46DD794EU);
  const char* digits = "123456789";
  CHECK_EQUAL(crc32c(reinterpret_cast<const std::byte*>(digits), 9), 0xE3069283U);
  CHECK_EQUAL(crc32c(bytes.data(), 0), 0U);
}

TEST(tables_agree_with_the_definition_at_every_length_and_alignment) {
  const auto bytes = random_bytes(600);
  for (std::size_t begin = 0; begin < 9; ++begin)
    for (std::size_t count = 0; begin + count <= bytes.size(); ++count)
      CHECK_EQUAL(detail::crc32c_tables(bytes.data() + begin, count, 0),
                  slow(bytes.data() + begin, count));
}

// Past twice the 768 bytes of three short streams, and past many steps of folding.
TEST(every_way_agrees_with_the_tables_at_every_length_and_alignment) {
  constexpr std::size_t kLongest = 1700;
  const auto bytes = random_bytes(kLongest + 64);
  for (std::size_t begin = 0; begin < 64; ++begin)
    for (std::size_t count = 0; count <= kLongest; ++count)
      check_against_tables(bytes.data() + begin, count, static_cast<std::uint32_t>(begin * 77777));
}

TEST(every_way_agrees_with_the_tables_around_the_lengths_of_its_streams) {
  constexpr std::size_t kRound = std::size_t{3} * 8192;
  constexpr std::size_t kQuarters = std::size_t{256} << 10;
  const auto bytes = random_bytes(3 * kQuarters);
  for (const std::size_t middle :
       {kRound, 2 * kRound, kRound + 768, 2 * kRound + 2 * 768, kQuarters, 2 * kQuarters,
        kQuarters + 256, 2 * kQuarters + kRound})
    for (std::size_t count = middle - 17; count <= middle + 17; ++count)
      check_against_tables(bytes.data() + 3, count, 5);
}

TEST(every_way_gives_the_known_values) {
  const std::vector<std::byte> zeros(32, std::byte{0});
  for (const detail::Crc32cWay& way : ways())
    CHECK_EQUAL(way.compute(zeros.data(), 32, 0), 0x8A9136AAU);
}

TEST(a_seed_continues_and_combine_joins) {
  const auto bytes = random_bytes(100000);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const std::size_t cut : {0U, 1U, 7U, 4096U, 99999U, 100000U}) {
    const std::uint32_t a = crc32c(bytes.data(), cut);
    const std::uint32_t b = crc32c(bytes.data() + cut, bytes.size() - cut);
    CHECK_EQUAL(crc32c(bytes.data() + cut, bytes.size() - cut, a), whole);
    CHECK_EQUAL(crc32c_combine(a, b, bytes.size() - cut), whole);
  }
}

TEST(threads_change_nothing) {
  const auto bytes = random_bytes((std::size_t{18} << 20) + 12345);
  const std::uint32_t expected = crc32c(bytes.data(), bytes.size(), 9);
  const int before = kernel_pool().threads();
  for (const int threads : {1, 2, 3, 7}) {
    kernel_pool().resize(threads);
    CHECK_EQUAL(crc32c_parallel(bytes.data(), bytes.size(), 9), expected);
    CHECK_EQUAL(crc32c_parallel(bytes.data(), 0, 9), 9U);
  }
  kernel_pool().resize(before);
}

TEST(large_ranges_are_checksummed_by_several_threads_as_by_one) {
  const auto bytes = random_bytes(std::size_t{3} << 20);
  const std::vector<const std::byte*> data = {bytes.data() + 1, bytes.data(), bytes.data() + 77};
  const std::vector<std::uint64_t> lengths = {(std::uint64_t{2} << 20) + 5, 0, 1000000};
  std::vector<std::uint32_t> out(3);
  crc32c_many(data.data(), lengths.data(), out.data(), out.size());
  for (std::size_t i = 0; i < 3; ++i)
    CHECK_EQUAL(out[i], detail::crc32c_tables(data[i], lengths[i], 0));
}

TEST(many_ranges_are_checksummed_each) {
  const auto bytes = random_bytes(5000);
  std::vector<const std::byte*> data;
  std::vector<std::uint64_t> lengths;
  for (std::size_t i = 0; i < 50; ++i) {
    data.push_back(bytes.data() + i * 90);
    lengths.push_back(i * 3);
  }
  for (const bool one_thread : {false, true}) {
    std::vector<std::uint32_t> out(50);
    crc32c_many(data.data(), lengths.data(), out.data(), out.size(), one_thread);
    for (std::size_t i = 0; i < 50; ++i) CHECK_EQUAL(out[i], slow(data[i], lengths[i]));
  }
}
