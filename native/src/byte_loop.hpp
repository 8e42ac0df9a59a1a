// SPDX-License-Identifier: Apache-2.0
// The update of an int8 state, block by block. Every array is read and written in words of 32 bits,
// and of each word four elements are taken by shifts: widening and narrowing bytes with the
// instructions made for it takes nearly as long as the arithmetic.
//
// The new scales are what the moments cannot exceed, given the old ones and the largest gradient:
// they are known before the moments, which are then written at once. As the steps of the codes are
// relative, nothing is lost by a scale that is larger than need be.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block_draws.hpp"
#include "compact_args.hpp"
#include "compact_masters.hpp"
#include "compact_moments.hpp"
#include "memascend/optimizer.hpp"

namespace memascend {

// Four bytes of an array of smaller elements. All platforms are little-endian.
using Word = std::uint32_t __attribute__((may_alias, aligned(1)));

// AdamRule with fewer operations: numbers that meet in a product are multiplied once, and both
// sides of the fraction are divided by the root of nu's bias correction. What that changes in the
// last places is far below the steps of the moments. There is no eps_root.
struct ByteRule {
  float grad_to_mu, grad_to_nu, b1, b2, learning_rate, eps, decay;

  explicit MEMASCEND_INLINE ByteRule(const RuleConstants& c) noexcept
      : grad_to_mu(c.one_minus_b1 * c.grad_scale),
        grad_to_nu(std::sqrt(c.one_minus_b2) * c.grad_scale),
        b1(c.b1),
        b2(c.b2),
        learning_rate(c.learning_rate * c.inverse_bias1 / std::sqrt(c.inverse_bias2)),
        eps(c.eps / std::sqrt(c.inverse_bias2)),
        decay(c.learning_rate * c.weight_decay) {}

  // The new moments from the old ones, b1 and b2 times those.
  MEMASCEND_INLINE float mu(float kept, float grad) const noexcept {
    return kept + grad_to_mu * grad;
  }
  MEMASCEND_INLINE float nu(float kept, float grad) const noexcept {
    const float root = grad_to_nu * grad;
    return kept + root * root;
  }
  MEMASCEND_INLINE float step(float mu, float nu) const noexcept {
    return learning_rate * mu / (std::sqrt(nu) + eps);
  }
  MEMASCEND_INLINE float moved(float p, float step) const noexcept {
    return p - (step + decay * p);
  }
};

// What the elements of a block have in common. b2 * nu is old_nu * x - zero_nu, where x is what
// NuByte takes. x of a new nu is (nu + zero_nu) * inverse_nu + lowest_nu: NuByte::lowest() exactly
// when nu was and stays zero, never less, and lowest_nu rounds so that this holds.
struct ByteScales {
  float old_mu, inverse_mu, old_nu, zero_nu, inverse_nu, lowest_nu;

  // scales: mu's and nu's, which are replaced.
  MEMASCEND_INLINE ByteScales(float* scales, float largest_grad, const ByteRule& rule) noexcept
      : old_mu(rule.b1 * scales[0]),
        old_nu(rule.b2 * scales[1]),
        zero_nu(old_nu * NuByte::lowest()) {
    scales[0] = block_scale(rule.mu(old_mu, largest_grad));
    scales[1] = block_scale(rule.nu(old_nu, largest_grad));
    inverse_mu = inverse_scale(scales[0]);
    inverse_nu = inverse_scale(scales[1]);
    lowest_nu = NuByte::lowest() - zero_nu * inverse_nu;
  }
};

template <typename Grad>
struct ByteBlocks {
  using Storage = typename Grad::Storage;
  std::uint16_t* param;
  std::uint8_t *residual, *mu, *nu;
  const Storage* grad;

  MEMASCEND_INLINE ByteBlocks from(std::uint64_t at) const noexcept {
    return {param + at, residual + at, mu + at, nu + at, grad + at};
  }
};

// A block of which only some elements are there. The others are updated from nothing.
template <typename Grad>
struct WholeBlock {
  std::uint16_t param[kBlockElements] = {};
  std::uint8_t residual[kBlockElements] = {}, mu[kBlockElements] = {}, nu[kBlockElements] = {};
  typename Grad::Storage grad[kBlockElements] = {};

  ByteBlocks<Grad> blocks() noexcept { return {param, residual, mu, nu, grad}; }

  // `n` elements, the first of which is element `at` of the block.
  void copy(const ByteBlocks<Grad>& from, std::uint64_t at, std::uint64_t n) noexcept {
    std::memcpy(param + at, from.param, n * sizeof *param);
    std::memcpy(residual + at, from.residual, n);
    std::memcpy(mu + at, from.mu, n);
    std::memcpy(nu + at, from.nu, n);
    std::memcpy(grad + at, from.grad, n * sizeof *grad);
  }
  void copy_back(const ByteBlocks<Grad>& to, std::uint64_t at, std::uint64_t n) const noexcept {
    std::memcpy(to.param, param + at, n * sizeof *param);
    std::memcpy(to.residual, residual + at, n);
    std::memcpy(to.mu, mu + at, n);
    std::memcpy(to.nu, nu + at, n);
  }
};

template <typename Grad>
struct ByteLoop {
  using Storage = typename Grad::Storage;
  static constexpr std::uint32_t kWords = kBlockElements / 4;

  static MEMASCEND_INLINE void run(const CompactArgs& args) noexcept {
    const ByteRule rule(args.constants);
    const ByteBlocks<Grad> all{
        args.param, static_cast<std::uint8_t*>(args.residual), static_cast<std::uint8_t*>(args.mu),
        static_cast<std::uint8_t*>(args.nu), static_cast<const Storage*>(args.grad)};
    float* scales = args.scales;
    for (std::uint64_t done = 0; done < args.n;) {
      const std::uint64_t position = args.first_element + done;
      const std::uint64_t phase = position % kBlockElements;
      std::uint64_t count = std::min(kBlockElements - phase, args.n - done);
      const bool is_part = count < kBlockElements;
      if (!is_part) count = (args.n - done) / kBlockElements * kBlockElements;
      WholeBlock<Grad> part;
      if (is_part) part.copy(all.from(done), phase, count);
      const std::uint64_t blocks = is_part ? 1 : count / kBlockElements;
      update(is_part ? part.blocks() : all.from(done), blocks, scales, args.key,
             static_cast<std::uint32_t>(position / kBlockElements), rule);
      if (is_part) part.copy_back(all.from(done), phase, count);
      scales += 2 * blocks;
      done += count;
    }
  }

  static MEMASCEND_INLINE void update(const ByteBlocks<Grad>& blocks, std::uint64_t n,
                                      float* scales, RandomKey key, std::uint32_t first_block,
                                      const ByteRule& rule) noexcept {
    float largest = largest_of(blocks.grad);
    for (std::uint64_t i = 0; i < n; ++i) {
      // The next block's is looked for first: nothing waits for it then.
      const ByteBlocks<Grad> block = blocks.from(i * kBlockElements);
      const float next = i + 1 < n ? largest_of(block.grad + kBlockElements) : 0.0F;
      const ByteScales block_scales(scales + 2 * i, largest, rule);
      loop(reinterpret_cast<Word*>(block.param), reinterpret_cast<Word*>(block.residual),
           reinterpret_cast<Word*>(block.mu), reinterpret_cast<Word*>(block.nu), block.grad,
           block_scales, BlockDraws(key, first_block + static_cast<std::uint32_t>(i)), rule);
      largest = next;
    }
  }

  // The largest magnitude of a block's gradients; not finite if any of them is not.
  static MEMASCEND_INLINE float largest_of(const Storage* __restrict grad) noexcept {
    if constexpr (std::is_same_v<Grad, Float32>) {
      std::uint32_t largest = 0;
      for (std::uint32_t i = 0; i < kBlockElements; ++i)
        largest = std::max(largest, bits_of(grad[i]) & 0x7FFFFFFFU);
      return float_of(largest);
    } else {
      std::uint16_t largest = 0;
      for (std::uint32_t i = 0; i < kBlockElements; ++i)
        largest = std::max(largest, static_cast<std::uint16_t>(grad[i] & 0x7FFFU));
      return Grad::load(largest);
    }
  }

  // Four elements, parameters in upper halves, and the word of each kind of byte.
  struct Quad {
    std::uint32_t param[4];
    std::uint32_t residual, mu, nu;
  };

  // The arrays are parameters because compilers believe `__restrict` of these only. What takes
  // longest, a root and a quotient for each element, is begun for all four first.
  static MEMASCEND_INLINE void loop(Word* __restrict param, Word* __restrict residual,
                                    Word* __restrict mu, Word* __restrict nu,
                                    const Storage* __restrict grad, const ByteScales& block_scales,
                                    const BlockDraws& block_draws,
                                    const ByteRule& constants) noexcept {
    const ByteRule rule = constants;
    const BlockDraws draws = block_draws;
    const ByteScales scales = block_scales;
    for (std::uint32_t i = 0; i < kWords; ++i) {
      const std::uint32_t low = param[2 * i], high = param[2 * i + 1];
      const Quad old{{low << 16, low & 0xFFFF0000U, high << 16, high & 0xFFFF0000U},
                     residual[i] ^ ByteMaster::kFlips,
                     mu[i],
                     nu[i]};
      Element e[4];
      moments<0>(old, gradient<0>(grad, i), scales, rule, e[0]);
      moments<1>(old, gradient<1>(grad, i), scales, rule, e[1]);
      moments<2>(old, gradient<2>(grad, i), scales, rule, e[2]);
      moments<3>(old, gradient<3>(grad, i), scales, rule, e[3]);
      Quad out{};
      codes<0>(out, e[0], scales, draws.template at<0>(i));
      codes<1>(out, e[1], scales, draws.template at<1>(i));
      codes<2>(out, e[2], scales, draws.template at<2>(i));
      codes<3>(out, e[3], scales, draws.template at<3>(i));
      master<0>(old, out, e[0], draws.template at<0>(i), rule);
      master<1>(old, out, e[1], draws.template at<1>(i), rule);
      master<2>(old, out, e[2], draws.template at<2>(i), rule);
      master<3>(old, out, e[3], draws.template at<3>(i), rule);
      param[2 * i] = out.param[0] >> 16 | (out.param[1] & 0xFFFF0000U);
      param[2 * i + 1] = out.param[2] >> 16 | (out.param[3] & 0xFFFF0000U);
      residual[i] = out.residual ^ ByteMaster::kFlips;
      mu[i] = out.mu;
      nu[i] = out.nu;
    }
  }

  // raised_nu: with zero_nu above it, see ByteScales.
  struct Element {
    float mu, nu, raised_nu, step;
  };

  template <int Byte>
  static MEMASCEND_INLINE void moments(const Quad& old, float grad, const ByteScales& scales,
                                       const ByteRule& rule, Element& e) noexcept {
    e.mu = rule.mu(scales.old_mu * MuByte::take<Byte>(old.mu), grad);
    e.raised_nu = rule.nu(scales.old_nu * NuByte::take<Byte>(old.nu), grad);
    e.nu = e.raised_nu - scales.zero_nu;
    e.step = rule.step(e.mu, e.nu);
  }

  // Both moments are rounded by the same bits, and so in the same direction: their quotient varies
  // less. The master takes the lowest 8 of these, which hardly ever decide about a moment.
  template <int Byte>
  static MEMASCEND_INLINE void codes(Quad& out, const Element& e, const ByteScales& scales,
                                     std::uint32_t drawn) noexcept {
    const std::uint32_t random = byte_draw(drawn);
    const float x = e.raised_nu * scales.inverse_nu + scales.lowest_nu;
    out.mu |= MuByte::put<Byte>(e.mu, scales.inverse_mu, random);
    out.nu |= NuByte::put<Byte>(x, e.nu, random);
  }

  template <int Byte>
  static MEMASCEND_INLINE void master(const Quad& old, Quad& out, const Element& e,
                                      std::uint32_t drawn, const ByteRule& rule) noexcept {
    const float p = ByteMaster::load(old.param[Byte], shifted<8 * Byte, 8>(old.residual));
    const std::uint32_t kept = ByteMaster::store(rule.moved(p, e.step), drawn & 0xFFU);
    out.param[Byte] = kept;
    out.residual |= shifted<8, 8 * Byte>(kept) & (0xFFU << 8 * Byte);
  }

  template <int Byte>
  static MEMASCEND_INLINE float gradient(const Storage* grad, std::uint32_t word) noexcept {
    if constexpr (sizeof(Storage) == 4) {
      return load_grad<Grad>(grad[4 * word + Byte]);
    } else {
      const std::uint32_t pair = reinterpret_cast<const Word*>(grad)[2 * word + Byte / 2];
      return load_grad<Grad>(static_cast<Storage>(Byte % 2 == 0 ? pair : pair >> 16));
    }
  }
};

}  // namespace memascend
