// SPDX-License-Identifier: Apache-2.0
// Arithmetic on large arrays in host memory: each call runs on the kernel threads with the best
// instruction set, allocates nothing, and gives the same bits for any number of threads and any
// instruction set (no fused multiply-add, fixed order of sums, denormals flushed to zero).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memascend {

enum class FloatType { kFloat32, kBfloat16, kFloat16 };

// "float32", "bfloat16", "float16"; throws std::invalid_argument otherwise.
FloatType float_type_named(const std::string& name);
std::uint64_t item_bytes(FloatType type) noexcept;

// One tile of AdamW state with float32 master, mu and nu, all updated in place. The arrays have `n`
// elements, natural alignment, and do not overlap. `param` may be null; otherwise the new master is
// also written there, rounded: bfloat16 to nearest with ties away from zero, float16 to nearest
// with ties to even.
struct AdamwTile {
  float* master;
  float* mu;
  float* nu;
  const void* grad;
  FloatType grad_type;
  void* param;
  FloatType param_type;
  std::uint64_t n;
};

// In optax's order of operations, all in float32:
//   g  = grad * grad_scale
//   mu = b1 * mu + (1 - b1) * g
//   nu = b2 * nu + (1 - b2) * g^2
//   u  = (mu / bias1) / (sqrt(nu / bias2) + eps) + weight_decay * master
//   master = master - lr * u
// with bias1 = 1 - b1^t and bias2 = 1 - b2^t at step t = 1, 2, ... 1 - b1 and 1 - b2 are taken in
// double precision and rounded once: computing 1.f - 0.999f makes every nu differ from optax's.
// Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101).
struct AdamwScalars {
  double learning_rate;
  double b1;
  double b2;
  double eps;
  double weight_decay;
  double bias1;
  double bias2;
  double grad_scale;
};

void adamw(const AdamwTile& tile, const AdamwScalars& scalars);

struct SquareSum {
  double sum;      // of squares in double precision; inf or nan when any element is
  bool nonfinite;  // whether any element is inf or nan
};

// One pass, no temporaries. A finite float32's square cannot overflow a double, so the sum tells
// whether an element was not finite and no second look is needed.
SquareSum norm_squared(const void* data, FloatType type, std::uint64_t n);

// dst[i] = src[i] rounded to bfloat16, nearest with ties away from zero: then the low 16 bits of
// the float32 alone tell whether the high half was rounded up. NaN stays NaN, large becomes inf.
void to_bfloat16(std::uint16_t* dst, const float* src, std::uint64_t n);

// dst[i] = src[i] rounded to float16, nearest with ties to even. NaN stays NaN, large becomes inf.
void to_float16(std::uint16_t* dst, const float* src, std::uint64_t n);

// dst[i] = src[i], exact (but for float32 denormals from bfloat16, which are kept as they are).
void to_float32(float* dst, const void* src, FloatType src_type, std::uint64_t n);

// memcpy on the kernel threads. Large copies go past the caches: the bytes are on their way to a
// disk, and filling the cache with them would evict what the computation needs.
void copy_bytes(std::byte* dst, const std::byte* src, std::uint64_t nbytes);

}  // namespace memascend
