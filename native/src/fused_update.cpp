// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "float_formats.hpp"
#include "memascend/optimizer.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"
#include "update_rules.hpp"

namespace memascend {
namespace {

// Half a megabyte of state per chunk: large beside the cost of handing out a chunk, small beside a
// tile, so that the threads finish together.
constexpr std::uint64_t kChunk = 32768;

struct Args {
  float* param;
  float* mu;
  float* nu;
  const void* grad;
  void* rounded;
  std::uint64_t n;
  RuleConstants constants;
};

struct NotRounded {
  using Storage = std::uint16_t;
};

template <typename Rule, typename Grad, typename Rounded>
struct UpdateLoop {
  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    loop(args.param, args.mu, args.nu, static_cast<const typename Grad::Storage*>(args.grad),
         static_cast<typename Rounded::Storage*>(args.rounded), args.n, args.constants);
  }

  // The arrays are parameters because clang believes `__restrict` of these only, and does not
  // vectorise the loop over five arrays without it.
  static MEMASCEND_INLINE void loop(float* __restrict param, float* __restrict mu,
                                    float* __restrict nu,
                                    const typename Grad::Storage* __restrict grad,
                                    typename Rounded::Storage* __restrict rounded, std::uint64_t n,
                                    const RuleConstants& constants) noexcept {
    const RuleConstants c = constants;
    for (std::uint64_t i = 0; i < n; ++i) {
      float m = 0, v = 0;
      if constexpr (Rule::kMoments > 0) m = mu[i];
      if constexpr (Rule::kMoments > 1) v = nu[i];
      const float p = Rule::apply(c, Grad::load(grad[i]), param[i], m, v);
      if constexpr (Rule::kMoments > 0) mu[i] = m;
      if constexpr (Rule::kMoments > 1) nu[i] = v;
      param[i] = p;
      if constexpr (!std::is_same_v<Rounded, NotRounded>) rounded[i] = Rounded::store(p);
    }
  }
};

template <typename T>
T* offset(T* array, std::uint64_t at) noexcept {
  return array == nullptr ? nullptr : array + at;
}

template <typename Rule, typename Grad, typename Rounded>
void run_tile(const FusedTile& tile, const RuleConstants& constants) {
  const auto loop = Compiled<UpdateLoop<Rule, Grad, Rounded>, Args>::best();
  const auto* grad = static_cast<const typename Grad::Storage*>(tile.grad);
  auto* rounded = static_cast<typename Rounded::Storage*>(tile.rounded);
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    loop({tile.param + at, offset(tile.mu, at), offset(tile.nu, at), grad + at, offset(rounded, at),
          std::min(kChunk, tile.n - at), constants});
  };
  kernel_pool().parallel_for((tile.n + kChunk - 1) / kChunk, one);
}

template <typename Rule, typename Grad>
void choose_rounded(const FusedTile& tile, const RuleConstants& constants) {
  if (tile.rounded == nullptr) return run_tile<Rule, Grad, NotRounded>(tile, constants);
  switch (tile.rounded_type) {
    case FloatType::kFloat32:
      return run_tile<Rule, Grad, Float32>(tile, constants);
    case FloatType::kBfloat16:
      return run_tile<Rule, Grad, Bfloat16>(tile, constants);
    case FloatType::kFloat16:
      return run_tile<Rule, Grad, Float16>(tile, constants);
  }
}

template <typename Rule>
void choose_grad(const FusedTile& tile, const RuleConstants& constants) {
  switch (tile.grad_type) {
    case FloatType::kFloat32:
      return choose_rounded<Rule, Float32>(tile, constants);
    case FloatType::kBfloat16:
      return choose_rounded<Rule, Bfloat16>(tile, constants);
    case FloatType::kFloat16:
      return choose_rounded<Rule, Float16>(tile, constants);
  }
}

}  // namespace

UpdateRule update_rule_named(const std::string& name) {
  if (name == "adam") return UpdateRule::kAdam;
  if (name == "adam_nesterov") return UpdateRule::kAdamNesterov;
  if (name == "lion") return UpdateRule::kLion;
  if (name == "sgd") return UpdateRule::kSgd;
  if (name == "momentum") return UpdateRule::kMomentum;
  if (name == "nesterov") return UpdateRule::kNesterov;
  if (name == "roof") return UpdateRule::kRoof;
  throw std::invalid_argument("unknown kernel '" + name +
                              "'; known are adam, adam_nesterov, lion, sgd, momentum, nesterov");
}

int moments_of(UpdateRule rule) noexcept {
  switch (rule) {
    case UpdateRule::kAdam:
    case UpdateRule::kAdamNesterov:
    case UpdateRule::kRoof:
      return 2;
    case UpdateRule::kSgd:
      return 0;
    default:
      return 1;
  }
}

void fused_update(UpdateRule rule, const FusedTile& tile, const UpdateNumbers& numbers) {
  const RuleConstants constants(numbers);
  switch (rule) {
    case UpdateRule::kAdam:
      return choose_grad<AdamRule<false>>(tile, constants);
    case UpdateRule::kAdamNesterov:
      return choose_grad<AdamRule<true>>(tile, constants);
    case UpdateRule::kLion:
      return choose_grad<LionRule>(tile, constants);
    case UpdateRule::kSgd:
      return choose_grad<SgdRule>(tile, constants);
    case UpdateRule::kMomentum:
      return choose_grad<MomentumRule<false>>(tile, constants);
    case UpdateRule::kNesterov:
      return choose_grad<MomentumRule<true>>(tile, constants);
    case UpdateRule::kRoof:
      return choose_grad<RoofRule>(tile, constants);
  }
}

}  // namespace memascend
