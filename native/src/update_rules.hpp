// SPDX-License-Identifier: Apache-2.0
// The rules on single elements. A rule turns gradient, parameter and moments into the new ones; in
// which form those are stored is the business of the loops.
#pragma once

#include <cmath>

#include "float_formats.hpp"
#include "memascend/optimizer.hpp"

namespace memascend {

// The numbers of a step in the precision in which they are used. Bias corrections are multiplied
// with: three divisions and a root for each element would take longer than its way from memory.
struct RuleConstants {
  float learning_rate, b1, one_minus_b1, b2, one_minus_b2, eps, eps_root, weight_decay,
      inverse_bias1, inverse_bias1_next, inverse_bias2, grad_scale;

  explicit RuleConstants(const UpdateNumbers& s) noexcept
      : learning_rate(static_cast<float>(s.learning_rate)),
        b1(static_cast<float>(s.b1)),
        one_minus_b1(static_cast<float>(1.0 - s.b1)),
        b2(static_cast<float>(s.b2)),
        one_minus_b2(static_cast<float>(1.0 - s.b2)),
        eps(static_cast<float>(s.eps)),
        eps_root(static_cast<float>(s.eps_root)),
        weight_decay(static_cast<float>(s.weight_decay)),
        inverse_bias1(static_cast<float>(1.0 / s.bias1)),
        inverse_bias1_next(static_cast<float>(1.0 / s.bias1_next)),
        inverse_bias2(static_cast<float>(1.0 / s.bias2)),
        grad_scale(static_cast<float>(s.grad_scale)) {}

  MEMASCEND_INLINE float moved(float p, float direction) const noexcept {
    return p - learning_rate * (direction + weight_decay * p);
  }
};

template <bool Nesterov>
struct AdamRule {
  static constexpr int kMoments = 2;
  static MEMASCEND_INLINE float apply(const RuleConstants& c, float grad, float p, float& mu,
                                      float& nu) noexcept {
    const float g = grad * c.grad_scale;
    mu = c.b1 * mu + c.one_minus_b1 * g;
    nu = c.b2 * nu + c.one_minus_b2 * (g * g);
    const float above =
        Nesterov ? c.b1 * (mu * c.inverse_bias1_next) + c.one_minus_b1 * (g * c.inverse_bias1)
                 : mu * c.inverse_bias1;
    return c.moved(p, above / (std::sqrt(nu * c.inverse_bias2 + c.eps_root) + c.eps));
  }
};

struct LionRule {
  static constexpr int kMoments = 1;
  static MEMASCEND_INLINE float apply(const RuleConstants& c, float grad, float p, float& mu,
                                      float&) noexcept {
    const float g = grad * c.grad_scale;
    const float mixed = c.one_minus_b1 * g + c.b1 * mu;
    // A NaN stays one: it must not turn into a step of an ordinary size.
    const float sign = mixed > 0.0F ? 1.0F : (mixed < 0.0F ? -1.0F : mixed);
    mu = c.one_minus_b2 * g + c.b2 * mu;
    return c.moved(p, sign);
  }
};

struct SgdRule {
  static constexpr int kMoments = 0;
  static MEMASCEND_INLINE float apply(const RuleConstants& c, float grad, float p, float&,
                                      float&) noexcept {
    return c.moved(p, grad * c.grad_scale);
  }
};

template <bool Nesterov>
struct MomentumRule {
  static constexpr int kMoments = 1;
  static MEMASCEND_INLINE float apply(const RuleConstants& c, float grad, float p, float& mu,
                                      float&) noexcept {
    const float g = grad * c.grad_scale;
    mu = g + c.b1 * mu;
    return c.moved(p, Nesterov ? g + c.b1 * mu : mu);
  }
};

// See UpdateRule::kRoof.
struct RoofRule {
  static constexpr int kMoments = 2;
  static MEMASCEND_INLINE float apply(const RuleConstants&, float grad, float p, float& mu,
                                      float& nu) noexcept {
    mu += grad;
    nu += grad;
    return p + grad;
  }
};

}  // namespace memascend
