// SPDX-License-Identifier: Apache-2.0
// The ways to compute CRC-32C that the processor offers. All give the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend::detail {

using Crc32c = std::uint32_t (*)(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed);

struct Crc32cWay {
  const char* name;
  bool (*is_available)();
  Crc32c compute;
};

// By tables alone, on every processor.
std::uint32_t crc32c_tables(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed);

// The ways of this architecture, the fastest first, and how many they are.
const Crc32cWay* crc32c_ways(std::size_t* count);

}  // namespace memascend::detail
