// SPDX-License-Identifier: Apache-2.0
// Known shortcoming: of a format's state only AdamW can be updated.
#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "byte_loop.hpp"
#include "compact_args.hpp"
#include "compact_masters.hpp"
#include "compact_moments.hpp"
#include "float_formats.hpp"
#include "memascend/optimizer.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"
#include "update_rules.hpp"

namespace memascend {
namespace {

// A multiple of the block; see fused_update.cpp.
constexpr std::uint64_t kChunk = 32768;
static_assert(kChunk % kBlockElements == 0);

template <typename Master, typename Moment, typename Grad>
struct FloatLoop {
  using Residual = std::conditional_t<std::is_void_v<typename Master::Residual>, std::uint16_t,
                                      typename Master::Residual>;
  static constexpr bool kHasResidual = !std::is_void_v<typename Master::Residual>;
  static constexpr bool kDraws = !std::is_same_v<Moment, Float32Moment>;

  static MEMASCEND_INLINE void run(const CompactArgs& args) noexcept {
    loop(args.param, static_cast<Residual*>(args.residual),
         static_cast<typename Moment::Storage*>(args.mu),
         static_cast<typename Moment::Storage*>(args.nu),
         static_cast<const typename Grad::Storage*>(args.grad), args.n,
         static_cast<std::uint32_t>(args.first_element), args.key, args.constants);
  }

  static MEMASCEND_INLINE void loop(std::uint16_t* __restrict param, Residual* __restrict residual,
                                    typename Moment::Storage* __restrict mu,
                                    typename Moment::Storage* __restrict nu,
                                    const typename Grad::Storage* __restrict grad, std::uint64_t n,
                                    std::uint32_t element, const RandomKey& random_key,
                                    const RuleConstants& constants) noexcept {
    const RuleConstants c = constants;
    const RandomKey key = random_key;
    // A counter of 32 bits, as wide as what it is mixed with: one of 64 costs more than the hash.
    const auto count = static_cast<std::uint32_t>(n);
    for (std::uint32_t i = 0; i < count; ++i) {
      float m = Moment::load(mu[i]);
      float v = Moment::load(nu[i]);
      float w;
      if constexpr (kHasResidual)
        w = Master::load(param[i], residual[i]);
      else
        w = Master::load(param[i]);
      const float p = AdamRule<false>::apply(c, load_grad<Grad>(grad[i]), w, m, v);
      std::uint32_t drawn = 0;
      if constexpr (kDraws) drawn = random_bits(key, element + i);
      if constexpr (kHasResidual)
        Master::store(p, param[i], residual[i]);
      else
        param[i] = Master::store(p, drawn & 0xFFFFU);
      mu[i] = Moment::store(m, drawn >> 16);
      nu[i] = Moment::store(v, random_again(drawn) >> 16);
    }
  }
};

struct Sizes {
  std::uint64_t residual, moment, grad;
};

void* moved(void* array, std::uint64_t bytes) noexcept {
  return array == nullptr ? nullptr : static_cast<std::byte*>(array) + bytes;
}

// Runs `loop` on elements [at, at + n) of memory, which begin at `position` of the tensor.
template <typename Loop>
void run_span(Loop loop, const CompactTile& tile, const RuleConstants& constants,
              const Sizes& sizes, std::uint64_t at, std::uint64_t n, std::uint64_t position,
              float* scales) noexcept {
  for (std::uint64_t done = 0; done < n;) {
    const std::uint64_t first = position + done;
    const std::uint64_t count = until_next_key(first, n - done);
    const std::uint64_t here = at + done;
    const std::uint64_t blocks = first / kBlockElements - position / kBlockElements;
    loop({tile.param + here, moved(tile.residual, here * sizes.residual),
          moved(tile.mu, here * sizes.moment), moved(tile.nu, here * sizes.moment),
          scales == nullptr ? nullptr : scales + 2 * blocks,
          static_cast<const std::byte*>(tile.grad) + here * sizes.grad, count, first,
          random_key_of(tile.random_key, first), constants});
    done += count;
  }
}

template <typename Kernel>
void run_tile(const CompactTile& tile, const RuleConstants& constants, const Sizes& sizes) {
  const auto loop = Compiled<Kernel, CompactArgs>::best();
  if (tile.row_starts != nullptr) {
    auto one = [&](std::uint64_t row) noexcept {
      float* scales = tile.scales == nullptr ? nullptr : tile.scales + 2 * tile.row_blocks * row;
      run_span(loop, tile, constants, sizes, row * tile.row_elements, tile.row_elements,
               static_cast<std::uint64_t>(tile.row_starts[row]), scales);
    };
    return kernel_pool().parallel_for(tile.n / tile.row_elements, one);
  }
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    float* scales = tile.scales == nullptr ? nullptr : tile.scales + 2 * (at / kBlockElements);
    run_span(loop, tile, constants, sizes, at, std::min(kChunk, tile.n - at),
             tile.first_element + at, scales);
  };
  kernel_pool().parallel_for((tile.n + kChunk - 1) / kChunk, one);
}

template <typename Grad>
void choose_format(CompactFormat format, const CompactTile& tile, const RuleConstants& constants) {
  constexpr std::uint64_t grad = sizeof(typename Grad::Storage);
  switch (format) {
    case CompactFormat::kSplit:
      return run_tile<FloatLoop<SplitMaster, Float32Moment, Grad>>(tile, constants, {2, 4, grad});
    case CompactFormat::kSplitBf16:
      return run_tile<FloatLoop<SplitMaster, Bfloat16Moment, Grad>>(tile, constants, {2, 2, grad});
    case CompactFormat::kBf16:
      return run_tile<FloatLoop<BareMaster, Bfloat16Moment, Grad>>(tile, constants, {0, 2, grad});
    case CompactFormat::kInt8:
      return run_tile<ByteLoop<Grad>>(tile, constants, {1, 1, grad});
  }
}

struct RoundArgs {
  std::uint16_t* dst;
  const float* src;
  std::uint64_t n;
  std::uint32_t element;
  RandomKey key;
};

struct RoundLoop {
  static MEMASCEND_INLINE void run(const RoundArgs& args) noexcept {
    auto* __restrict dst = args.dst;
    const auto* __restrict src = args.src;
    const RandomKey key = args.key;
    const auto count = static_cast<std::uint32_t>(args.n);
    for (std::uint32_t i = 0; i < count; ++i)
      dst[i] =
          bfloat16_stochastic(with_plain_nan(src[i]), random_bits(key, args.element + i) & 0xFFFFU);
  }
};

}  // namespace

CompactFormat compact_format_named(const std::string& name) {
  if (name == "split") return CompactFormat::kSplit;
  if (name == "split_bf16") return CompactFormat::kSplitBf16;
  if (name == "bf16") return CompactFormat::kBf16;
  if (name == "int8") return CompactFormat::kInt8;
  throw std::invalid_argument("unknown compact format '" + name +
                              "'; known are split, split_bf16, bf16, int8");
}

void compact_update(CompactFormat format, const CompactTile& tile, const UpdateNumbers& numbers) {
  if (format == CompactFormat::kInt8 && numbers.eps_root != 0)
    throw std::invalid_argument("the update of int8 has no eps_root");
  const RuleConstants constants(numbers);
  switch (tile.grad_type) {
    case FloatType::kFloat32:
      return choose_format<Float32>(format, tile, constants);
    case FloatType::kBfloat16:
      return choose_format<Bfloat16>(format, tile, constants);
    case FloatType::kFloat16:
      return choose_format<Float16>(format, tile, constants);
  }
}

void to_bfloat16_stochastic(std::uint16_t* dst, const float* src, std::uint64_t n,
                            std::uint64_t first_element, std::uint64_t random_key) {
  const auto loop = Compiled<RoundLoop, RoundArgs>::best();
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t end = std::min(n, (chunk + 1) * kChunk);
    for (std::uint64_t at = chunk * kChunk; at < end;) {
      const std::uint64_t first = first_element + at;
      const std::uint64_t count = until_next_key(first, end - at);
      loop({dst + at, src + at, count, static_cast<std::uint32_t>(first),
            random_key_of(random_key, first)});
      at += count;
    }
  };
  kernel_pool().parallel_for((n + kChunk - 1) / kChunk, one);
}

}  // namespace memascend
