// SPDX-License-Identifier: Apache-2.0
// The optimizer's arithmetic on tiles in host memory. As for the other kernels: best instruction
// set, kernel threads, nothing allocated, the same bits for any of them, denormals flushed to zero.
#pragma once

#include <cstdint>
#include <string>

#include "memascend/kernels.hpp"

namespace memascend {

// kRoof is no optimizer: it adds the gradient to param, mu and nu, with the loads and stores of
// kAdam, so that a measurement can tell what memory allows.
enum class UpdateRule { kAdam, kAdamNesterov, kLion, kSgd, kMomentum, kNesterov, kRoof };

// "adam", "adam_nesterov", "lion", "sgd", "momentum", "nesterov", "roof"; throws
// std::invalid_argument otherwise.
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
// where bias1 = 1 - b1^t, bias1_next = 1 - b1^(t+1), bias2 = 1 - b2^t at step t = 1, 2, ...; it is
// multiplied with their reciprocals, the one difference to optax, of a unit in the last place. 1 -
// b1 and 1 - b2 are taken in double precision and rounded once: computing 1.f - 0.999f makes every
// nu differ from optax's. Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization
// (arXiv 1711.05101); Dozat, Incorporating Nesterov Momentum into Adam; Chen et al., Symbolic
// Discovery of Optimization Algorithms (arXiv 2302.06675); Sutskever et al. (ICML 2013).
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

// Forms of AdamW's state of less than float32, by bytes per parameter:
//   split       8 + 4  param is the high half of the float32 master, rounded to nearest with ties
//                      away from zero; residual its low 16 bits; float32 moments
//   split_bf16  4 + 4  the same with bfloat16 moments
//   bf16        4 + 2  param is the master; bfloat16 moments
//   int8        2 + 3  param is the high half of a master of 24 bits, residual its low 8 bits;
//                      8-bit moments with a scale for each block of kBlockElements
// Everything but split's master and moments is rounded stochastically: with nearest rounding a
// moment that changes by less than half a unit per step never changes.
enum class CompactFormat { kSplit, kSplitBf16, kBf16, kInt8 };

// "split", "split_bf16", "bf16", "int8"; throws std::invalid_argument otherwise.
CompactFormat compact_format_named(const std::string& name);

// Blocks begin at multiples of this from the start of the tensor.
inline constexpr std::uint64_t kBlockElements = 256;

// One tile, or rows of a tensor that lie together in memory: in either case `n` elements.
//
// What is drawn for an element depends on random_key, its position in the whole tensor and what it
// is drawn for, so results do not depend on how a tensor is cut.
struct CompactTile {
  std::uint16_t* param;
  void* residual;  // uint16 for the split formats, uint8 for int8, else null
  void* mu;
  void* nu;
  float* scales;  // int8 only: mu's and nu's scale of each block, in turn
  const void* grad;
  FloatType grad_type;
  std::uint64_t n;
  std::uint64_t first_element;  // position of the tile; for int8 a multiple of kBlockElements
  std::uint64_t random_key;
  // Not null: memory holds rows of row_elements each, which begin at these positions. For int8 the
  // scales are those of row_blocks blocks for each row, from the one in which it begins; new
  // moments are of rows alone and not to be kept.
  const std::int64_t* row_starts;
  std::uint64_t row_elements;
  std::uint64_t row_blocks;
};

// AdamW. For int8 with constants that are folded into one another, which changes last places only,
// and without eps_root: another one than zero throws std::invalid_argument.
void compact_update(CompactFormat format, const CompactTile& tile, const UpdateNumbers& numbers);

// dst[i] = src[i] as bfloat16, rounded up in magnitude with the probability of its distance to the
// next lower one; inf and NaN stay.
void to_bfloat16_stochastic(std::uint16_t* dst, const float* src, std::uint64_t n,
                            std::uint64_t first_element, std::uint64_t random_key);

}  // namespace memascend
