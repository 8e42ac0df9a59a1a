// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
    *args.sum = tree_sum(lanes);
  }

  static MEMASCEND_INLINE void add(double& lane, typename Format::Storage stored) noexcept {
    const auto value = static_cast<double>(Format::load(stored));
    lane += value * value;
  }

  static MEMASCEND_INLINE double tree_sum(double (&lanes)[kLanes]) noexcept {
    for (std::uint64_t width = kLanes / 2; width > 0; width /= 2)
      for (std::uint64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
  }
};

// The same for halves, whose squares are exact in float32: a lane adds up four of them before they
// are widened, which is most of the work. Each such sum is off by two roundings of float32 at most,
// in either direction. Where float32 does not reach, the chunk is added up as above.
template <typename Format>
struct HalfSquareSumLoop {
  static constexpr std::uint64_t kGroup = 4 * kLanes;
  // Below this, squares that float32 has lost could count.
  static constexpr double kLeast = 0x1p-80;

  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    const auto* __restrict data = static_cast<const typename Format::Storage*>(args.data);
    double lanes[kLanes] = {};
    const std::uint64_t whole = args.n / kGroup * kGroup;
    for (std::uint64_t i = 0; i < whole; i += kGroup)
      for (std::uint64_t lane = 0; lane < kLanes; ++lane) {
        const auto* at = data + i + lane;
        lanes[lane] += static_cast<double>((square(at[0]) + square(at[kLanes])) +
                                           (square(at[2 * kLanes]) + square(at[3 * kLanes])));
      }
    finish(args, lanes, whole);
  }

  // Adds what is left from `whole` on, and all lanes.
  static MEMASCEND_INLINE void finish(const Args& args, double (&lanes)[kLanes],
                                      std::uint64_t whole) noexcept {
    const auto* data = static_cast<const typename Format::Storage*>(args.data);
    for (std::uint64_t i = whole; i < args.n; ++i)
      lanes[i % kLanes] += static_cast<double>(square(data[i]));
    const double sum = SquareSumLoop<Format>::tree_sum(lanes);
    if (sum >= kLeast && sum <= std::numeric_limits<double>::max())
      *args.sum = sum;
    else
      SquareSumLoop<Format>::run(args);
  }

  static MEMASCEND_INLINE float square(typename Format::Storage stored) noexcept {
    const float value = Format::load(stored);
    return value * value;
  }
};

#if defined(__x86_64__)
// The same sums of float16 with the processor's own conversion, which the compiler does not find:
// without it, taking a half apart costs twice as much as everything else. The masked forms do what
// the plain ones do, whose undefined operands make gcc 12 warn.
struct Float16Squares {
  using Loop = HalfSquareSumLoop<Float16>;

  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void avx512(
      const Args& args) noexcept {
    const auto* data = static_cast<const std::uint16_t*>(args.data);
    const std::uint64_t whole = args.n / Loop::kGroup * Loop::kGroup;
    __m512d low = _mm512_setzero_pd();
    __m512d high = _mm512_setzero_pd();
    for (std::uint64_t i = 0; i < whole; i += Loop::kGroup) {
      __m512 squares[4];
      for (int part = 0; part < 4; ++part) {
        const auto* at = reinterpret_cast<const __m256i*>(data + i) + part;
        const __m512 value = _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(at));
        squares[part] = _mm512_mul_ps(value, value);
      }
      const __m512 sum = _mm512_add_ps(_mm512_add_ps(squares[0], squares[1]),
                                       _mm512_add_ps(squares[2], squares[3]));
      low = _mm512_add_pd(low,
                          _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, sum, 0)));
      high = _mm512_add_pd(high,
                           _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, sum, 1)));
    }
    double lanes[kLanes];
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
    Loop::finish(args, lanes, whole);
  }

  __attribute__((target("avx2,f16c"))) static void avx2(const Args& args) noexcept {
    const auto* data = static_cast<const std::uint16_t*>(args.data);
    const std::uint64_t whole = args.n / Loop::kGroup * Loop::kGroup;
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                       _mm256_setzero_pd()};
    for (std::uint64_t i = 0; i < whole; i += Loop::kGroup)
      for (int half = 0; half < 2; ++half) {
        __m256 squares[4];
        for (int part = 0; part < 4; ++part) {
          const auto* at = reinterpret_cast<const __m128i*>(data + i) + 2 * part + half;
          const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(at));
          squares[part] = _mm256_mul_ps(value, value);
        }
        const __m256 sum = _mm256_add_ps(_mm256_add_ps(squares[0], squares[1]),
                                         _mm256_add_ps(squares[2], squares[3]));
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(sum));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(sum, 1));
        sums[2 * half] = _mm256_add_pd(sums[2 * half], low);
        sums[2 * half + 1] = _mm256_add_pd(sums[2 * half + 1], high);
      }
    double lanes[kLanes];
    for (int part = 0; part < 4; ++part) _mm256_storeu_pd(lanes + 4 * part, sums[part]);
    Loop::finish(args, lanes, whole);
  }

  static Compiled<Loop, Args>::Function best() noexcept {
    if (current_isa() == Isa::kAvx512) return avx512;
    if (current_isa() == Isa::kAvx2 && __builtin_cpu_supports("f16c")) return avx2;
    return Compiled<Loop, Args>::best();
  }
};
#else
using Float16Squares = Compiled<HalfSquareSumLoop<Float16>, Args>;
#endif

// Rounds of at most 1,024 chunks keep the partial sums on the stack; they are added in order.
template <typename Format, typename Choice>
double sum_of_squares(const void* untyped, std::uint64_t n) {
  constexpr std::uint64_t kChunksPerRound = 1024;
  const auto loop = Choice::best();
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

struct WordArgs {
  const std::uint64_t* data;
  std::uint64_t n;
  std::uint64_t* result;
};

struct WordLoop {
  static MEMASCEND_INLINE void run(const WordArgs& args) noexcept {
    const auto* __restrict data = args.data;
    std::uint64_t found = 0;
    for (std::uint64_t i = 0; i < args.n; ++i) found ^= data[i];
    *args.result = found;
  }
};

}  // namespace

std::uint64_t read_words(const void* untyped, std::uint64_t nbytes) {
  const auto loop = Compiled<WordLoop, WordArgs>::best();
  const auto* data = static_cast<const std::uint64_t*>(untyped);
  const std::uint64_t n = nbytes / sizeof(std::uint64_t);
  std::atomic<std::uint64_t> all{0};
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    std::uint64_t found = 0;
    loop({data + at, std::min(kChunk, n - at), &found});
    all.fetch_xor(found, std::memory_order_relaxed);
  };
  kernel_pool().parallel_for((n + kChunk - 1) / kChunk, one);
  return all.load();
}

SquareSum norm_squared(const void* data, FloatType type, std::uint64_t n) {
  double sum = 0;
  switch (type) {
    case FloatType::kFloat32:
      sum = sum_of_squares<Float32, Compiled<SquareSumLoop<Float32>, Args>>(data, n);
      break;
    case FloatType::kBfloat16:
      sum = sum_of_squares<Bfloat16, Compiled<HalfSquareSumLoop<Bfloat16>, Args>>(data, n);
      break;
    case FloatType::kFloat16:
      sum = sum_of_squares<Float16, Float16Squares>(data, n);
      break;
  }
  return {sum, !std::isfinite(sum)};
}

}  // namespace memascend
