// SPDX-License-Identifier: Apache-2.0
// The optimizer's arithmetic on tiles in host memory. As for the other kernels: best instruction
// set, kernel threads, nothing allocated, the same bits for any of them, denormals flushed to zero.
#pragma once

#include <cstdint>
#include <string>

#include "memascend/kernels.hpp"

namespace memascend {

enum class UpdateRule { kAdam, kAdamNesterov, kLion, kSgd, kMomentum, kNesterov };

// "adam", "adam_nesterov", "lion", "sgd", "momentum", "nesterov"; throws std::invalid_argument
// otherwise.
UpdateRule update_rule_named(const std::string& name);

// How many moments of the tile a rule uses: mu, then nu.
int moments_of(UpdateRule rule) noexcept;

// The formulas, in optax's order of operations, all in float32, with g = grad * grad_scale and
// p -= lr * (u + weight_decay * p) for the direction u:
//   adam      mu = b1 * mu + (1 - b1) * g
//             nu = b2 * nu + (1 - b2) * g^2
//             u  = (mu / bias1) / (sqrt(nu / bias2 + eps_root) + eps)
//   nesterov  the same with b1 * (mu / bias1_next) + (1 - b1) * (g / bias1) above the line
//   lion      u  = sign(b1 * mu + (1 - b1) * g);  mu = b2 * mu + (1 - b2) * g
//   momentum  mu = g + b1 * mu;  u = mu, with Nesterov u = g + b1 * mu;  sgd: u = g
// where bias1 = 1 - b1^t, bias1_next = 1 - b1^(t+1), bias2 = 1 - b2^t at step t = 1, 2, ... 1 - b1
// and 1 - b2 are taken in double precision and rounded once: computing 1.f - 0.999f makes every nu
// differ from optax's.
// Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101); Dozat,
// Incorporating Nesterov Momentum into Adam; Chen et al., Symbolic Discovery of Optimization
// Algorithms (arXiv 2302.06675); Sutskever et al. (ICML 2013).
struct UpdateNumbers {
  double learning_rate;
  double b1;
  double b2;
  double eps;
  double eps_root;
  double weight_decay;
  double bias1;
  double bias1_next;
  double bias2;
  double grad_scale;
};

// One tile of every array, each n elements, naturally aligned, none overlapping; mu and nu are null
// where the rule has none. `rounded` may be null; otherwise the new parameters are also written
// there, rounded: bfloat16 to nearest with ties away from zero, float16 with ties to even.
struct FusedTile {
  float* param;
  float* mu;
  float* nu;
  const void* grad;
  FloatType grad_type;
  void* rounded;
  FloatType rounded_type;
  std::uint64_t n;
};

void fused_update(UpdateRule rule, const FusedTile& tile, const UpdateNumbers& numbers);

}  // namespace memascend
