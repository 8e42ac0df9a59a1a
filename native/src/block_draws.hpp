// SPDX-License-Identifier: Apache-2.0
// What is drawn for the elements of one block: a hash for the block, and one multiplication for
// each of its elements, which is a third of what a hash for each of them takes.
//
// Over the keys all 32 bits of an element are uniform, as the first half of the block's hash is and
// what follows is a bijection. Two elements of a block are as good as independent, as what differs
// between them is multiplied by the other half (Dietzfelbinger et al., A Reliable Randomized
// Algorithm for the Closest-Pair Problem, 1997).
#pragma once

#include <array>
#include <cstdint>

#include "memascend/optimizer.hpp"
#include "stochastic.hpp"

namespace memascend {

// A number for each element of a block. No two agree in their lowest 8 bits, for of what they
// differ in above the multiplication tells nothing below. Every fourth lies together: a loop takes
// them so.
struct BlockNumbers {
  static constexpr std::uint32_t kStride = kBlockElements / 4;
  std::array<std::uint32_t, kBlockElements> of{};

  constexpr BlockNumbers() {
    for (std::uint32_t i = 0; i < kBlockElements; ++i) {
      const auto upper = static_cast<std::uint32_t>(mix64(i) >> 40) << 8;
      of[i % 4 * kStride + i / 4] = upper | (i * 167 + 13) % kBlockElements;
    }
  }
};
static_assert(kBlockElements == 256);
inline constexpr BlockNumbers kBlockNumbers;

struct BlockDraws {
  std::uint32_t flipped;
  std::uint32_t factor;

  // block: the number of the block among those that share the key.
  MEMASCEND_INLINE BlockDraws(RandomKey key, std::uint32_t block) noexcept {
    const std::uint64_t whole = std::uint64_t{key.second} << 32 | key.first;
    const std::uint64_t mixed = mix64(whole + block * std::uint64_t{0x9E3779B97F4A7C15U});
    flipped = static_cast<std::uint32_t>(mixed);
    factor = static_cast<std::uint32_t>(mixed >> 32) | 1U;
  }

  // 32 random bits for element 4 * word + Byte of the block.
  template <int Byte>
  MEMASCEND_INLINE std::uint32_t at(std::uint32_t word) const noexcept {
    return (kBlockNumbers.of[Byte * BlockNumbers::kStride + word] ^ flipped) * factor;
  }
};

}  // namespace memascend
