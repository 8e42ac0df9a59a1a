// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "float_formats.hpp"
#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"

namespace memascend {
namespace {

// Half a megabyte of state per chunk: large beside the cost of handing out a chunk, small beside a
// tile, so that the threads finish together.
constexpr std::uint64_t kChunk = 32768;

struct Constants {
  float learning_rate, b1, one_minus_b1, b2, one_minus_b2, eps, weight_decay, bias1, bias2,
      grad_scale;
};

Constants rounded_once(const AdamwScalars& s) noexcept {
  return {static_cast<float>(s.learning_rate), static_cast<float>(s.b1),
          static_cast<float>(1.0 - s.b1),      static_cast<float>(s.b2),
          static_cast<float>(1.0 - s.b2),      static_cast<float>(s.eps),
          static_cast<float>(s.weight_decay),  static_cast<float>(s.bias1),
          static_cast<float>(s.bias2),         static_cast<float>(s.grad_scale)};
}

struct Args {
  float* master;
  float* mu;
  float* nu;
  const void* grad;
  void* param;
  std::uint64_t n;
  Constants c;
};

struct NoParam {
  using Storage = std::uint16_t;
};

template <typename Grad, typename Param>
struct AdamwLoop {
  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    loop(args.master, args.mu, args.nu, static_cast<const typename Grad::Storage*>(args.grad),
         static_cast<typename Param::Storage*>(args.param), args.n, args.c);
  }

  // The arrays are parameters because clang believes `__restrict` of these only, and does not
  // vectorise the loop over five arrays without it.
  static MEMASCEND_INLINE void loop(float* __restrict master, float* __restrict mu,
                                    float* __restrict nu,
                                    const typename Grad::Storage* __restrict grad,
                                    typename Param::Storage* __restrict param, std::uint64_t n,
                                    const Constants& constants) noexcept {
    const Constants c = constants;
    for (std::uint64_t i = 0; i < n; ++i) {
      const float g = Grad::load(grad[i]) * c.grad_scale;
      const float m = c.b1 * mu[i] + c.one_minus_b1 * g;
      const float v = c.b2 * nu[i] + c.one_minus_b2 * (g * g);
      const float direction = (m / c.bias1) / (std::sqrt(v / c.bias2) + c.eps);
      const float w = master[i] - c.learning_rate * (direction + c.weight_decay * master[i]);
      mu[i] = m;
      nu[i] = v;
      master[i] = w;
      if constexpr (!std::is_same_v<Param, NoParam>) param[i] = Param::store(w);
    }
  }
};

template <typename Grad, typename Param>
void run_tile(const AdamwTile& tile, const Constants& constants) {
  const auto loop = Compiled<AdamwLoop<Grad, Param>, Args>::best();
  const auto* grad = static_cast<const typename Grad::Storage*>(tile.grad);
  auto* param = static_cast<typename Param::Storage*>(tile.param);
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    loop({tile.master + at, tile.mu + at, tile.nu + at, grad + at,
          param == nullptr ? nullptr : param + at, std::min(kChunk, tile.n - at), constants});
  };
  kernel_pool().parallel_for((tile.n + kChunk - 1) / kChunk, one);
}

template <typename Grad>
void choose_param(const AdamwTile& tile, const Constants& constants) {
  if (tile.param == nullptr) return run_tile<Grad, NoParam>(tile, constants);
  switch (tile.param_type) {
    case FloatType::kFloat32:
      return run_tile<Grad, Float32>(tile, constants);
    case FloatType::kBfloat16:
      return run_tile<Grad, Bfloat16>(tile, constants);
    case FloatType::kFloat16:
      return run_tile<Grad, Float16>(tile, constants);
  }
}

}  // namespace

void adamw(const AdamwTile& tile, const AdamwScalars& scalars) {
  const Constants constants = rounded_once(scalars);
  switch (tile.grad_type) {
    case FloatType::kFloat32:
      return choose_param<Float32>(tile, constants);
    case FloatType::kBfloat16:
      return choose_param<Bfloat16>(tile, constants);
    case FloatType::kFloat16:
      return choose_param<Float16>(tile, constants);
  }
}

}  // namespace memascend
