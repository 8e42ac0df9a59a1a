// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include "float_formats.hpp"
#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"

namespace memascend {
namespace {

// Both constants are part of the result's definition: they fix the order of the additions.
constexpr std::uint64_t kChunk = 65536;
constexpr std::uint64_t kLanes = 16;

struct Args {
  const void* data;
  std::uint64_t n;
  double* sum;
};

// Element i of a chunk is added to lane i mod 16, whatever the width of the machine's vectors; the
// lanes are added as a binary tree. A product of two float32 is exact in double.
template <typename Format>
struct SquareSumLoop {
  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    const auto* __restrict data = static_cast<const typename Format::Storage*>(args.data);
    double lanes[kLanes] = {};
    const std::uint64_t whole = args.n / kLanes * kLanes;
    for (std::uint64_t i = 0; i < whole; i += kLanes)
      for (std::uint64_t lane = 0; lane < kLanes; ++lane) add(lanes[lane], data[i + lane]);
    for (std::uint64_t i = whole; i < args.n; ++i) add(lanes[i - whole], data[i]);
    for (std::uint64_t width = kLanes / 2; width > 0; width /= 2)
      for (std::uint64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    *args.sum = lanes[0];
  }

  static MEMASCEND_INLINE void add(double& lane, typename Format::Storage stored) noexcept {
    const auto value = static_cast<double>(Format::load(stored));
    lane += value * value;
  }
};

// Rounds of at most 1,024 chunks keep the partial sums on the stack; they are added in order.
template <typename Format>
double sum_of_squares(const void* untyped, std::uint64_t n) {
  constexpr std::uint64_t kChunksPerRound = 1024;
  const auto loop = Compiled<SquareSumLoop<Format>, Args>::best();
  const auto* data = static_cast<const typename Format::Storage*>(untyped);
  const std::uint64_t chunks = (n + kChunk - 1) / kChunk;
  std::array<double, kChunksPerRound> partial;
  double sum = 0;
  for (std::uint64_t first = 0; first < chunks; first += kChunksPerRound) {
    const std::uint64_t count = std::min(kChunksPerRound, chunks - first);
    auto one = [&](std::uint64_t chunk) noexcept {
      const std::uint64_t at = (first + chunk) * kChunk;
      loop({data + at, std::min(kChunk, n - at), &partial[chunk]});
    };
    kernel_pool().parallel_for(count, one);
    for (std::uint64_t chunk = 0; chunk < count; ++chunk) sum += partial[chunk];
  }
  return sum;
}

}  // namespace

SquareSum norm_squared(const void* data, FloatType type, std::uint64_t n) {
  double sum = 0;
  switch (type) {
    case FloatType::kFloat32:
      sum = sum_of_squares<Float32>(data, n);
      break;
    case FloatType::kBfloat16:
      sum = sum_of_squares<Bfloat16>(data, n);
      break;
    case FloatType::kFloat16:
      sum = sum_of_squares<Float16>(data, n);
      break;
  }
  return {sum, !std::isfinite(sum)};
}

}  // namespace memascend
