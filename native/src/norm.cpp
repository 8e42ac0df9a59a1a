// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "float_formats.hpp"
#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"

namespace memascend {
namespace {

// These constants are part of the result's definition: they fix the order of the additions. A chunk
// is long beside what it takes the processor to see that it is read in order.
constexpr std::uint64_t kChunk = 65536;
constexpr std::uint64_t kHalfChunk = 262144;
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

// The same for halves, whose squares are exact in float32: a lane adds up eight of them, in pairs,
// before they are widened, which would be most of the work. Each such sum is off by three roundings
// of float32 at most, in either direction. Where float32 does not reach, the chunk is added up as
// above.
//
// Which elements are a pair is what takes fewest instructions: of bfloat16 the two of a word, which
// a shift and a mask widen; of float16 two that are 16 apart, as the processor widens neighbours.
template <typename Format>
struct HalfSquareSumLoop {
  static constexpr std::uint64_t kGroup = 8 * kLanes;
  static constexpr bool kWords = std::is_same_v<Format, Bfloat16>;
  // Below this, squares that float32 has lost could count.
  static constexpr double kLeast = 0x1p-80;

  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    const auto* __restrict data = static_cast<const typename Format::Storage*>(args.data);
    double lanes[kLanes] = {};
    const std::uint64_t whole = args.n / kGroup * kGroup;
    for (std::uint64_t i = 0; i < whole; i += kGroup)
      for (std::uint64_t lane = 0; lane < kLanes; ++lane) {
        const auto* at = data + i + (kWords ? 2 * lane : lane);
        lanes[lane] += static_cast<double>((pair(at) + pair(at + 2 * kLanes)) +
                                           (pair(at + 4 * kLanes) + pair(at + 6 * kLanes)));
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

  static MEMASCEND_INLINE float pair(const typename Format::Storage* at) noexcept {
    return square(at[0]) + square(at[kWords ? 1 : kLanes]);
  }

  static MEMASCEND_INLINE float square(typename Format::Storage stored) noexcept {
    const float value = Format::load(stored);
    return value * value;
  }
};

#if defined(__x86_64__)
// The same sums with the processor's own conversions, which the compiler does not find: without
// them, taking a half apart costs twice as much as everything else. The masked forms do what the
// plain ones do, whose undefined operands make gcc 12 warn.
template <typename Format>
struct HalfSquares {
  using Loop = HalfSquareSumLoop<Format>;

  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void avx512(
      const Args& args) noexcept {
    const auto* data = static_cast<const std::uint16_t*>(args.data);
    const std::uint64_t whole = args.n / Loop::kGroup * Loop::kGroup;
    __m512d low = _mm512_setzero_pd();
    __m512d high = _mm512_setzero_pd();
    for (std::uint64_t i = 0; i < whole; i += Loop::kGroup) {
      __m512 pairs[4];
      for (int part = 0; part < 4; ++part) {
        const auto* at = data + i + 32 * part;
        __m512 one, other;
        if constexpr (Loop::kWords) {
          const __m512i words = _mm512_loadu_si512(at);
          one = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, words, 16));
          other = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(kUpperHalf)));
        } else {
          one = _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(vector(at)));
          other = _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(vector(at + 16)));
        }
        pairs[part] = _mm512_add_ps(_mm512_mul_ps(one, one), _mm512_mul_ps(other, other));
      }
      const __m512 sum =
          _mm512_add_ps(_mm512_add_ps(pairs[0], pairs[1]), _mm512_add_ps(pairs[2], pairs[3]));
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
        __m256 pairs[4];
        for (int part = 0; part < 4; ++part) {
          const auto* at = data + i + 32 * part;
          __m256 one, other;
          if constexpr (Loop::kWords) {
            const __m256i words = _mm256_loadu_si256(vector(at + 16 * half));
            one = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            other = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(kUpperHalf)));
          } else {
            const auto* eight = reinterpret_cast<const __m128i*>(at + 8 * half);
            one = _mm256_cvtph_ps(_mm_loadu_si128(eight));
            other = _mm256_cvtph_ps(_mm_loadu_si128(eight + 2));
          }
          pairs[part] = _mm256_add_ps(_mm256_mul_ps(one, one), _mm256_mul_ps(other, other));
        }
        const __m256 sum =
            _mm256_add_ps(_mm256_add_ps(pairs[0], pairs[1]), _mm256_add_ps(pairs[2], pairs[3]));
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(sum));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(sum, 1));
        sums[2 * half] = _mm256_add_pd(sums[2 * half], low);
        sums[2 * half + 1] = _mm256_add_pd(sums[2 * half + 1], high);
      }
    double lanes[kLanes];
    for (int part = 0; part < 4; ++part) _mm256_storeu_pd(lanes + 4 * part, sums[part]);
    Loop::finish(args, lanes, whole);
  }

  static const __m256i* vector(const std::uint16_t* at) noexcept {
    return reinterpret_cast<const __m256i*>(at);
  }

  static typename Compiled<Loop, Args>::Function best() noexcept {
    if (current_isa() == Isa::kAvx512) return avx512;
    if (current_isa() == Isa::kAvx2 && __builtin_cpu_supports("f16c")) return avx2;
    return Compiled<Loop, Args>::best();
  }

  static constexpr int kUpperHalf = -0x10000;
};
#else
template <typename Format>
using HalfSquares = Compiled<HalfSquareSumLoop<Format>, Args>;
#endif

// Rounds of at most 1,024 chunks keep the partial sums on the stack; they are added in order.
template <typename Format, typename Choice, std::uint64_t kChunk>
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
      sum = sum_of_squares<Float32, Compiled<SquareSumLoop<Float32>, Args>, kChunk>(data, n);
      break;
    case FloatType::kBfloat16:
      sum = sum_of_squares<Bfloat16, HalfSquares<Bfloat16>, kHalfChunk>(data, n);
      break;
    case FloatType::kFloat16:
      sum = sum_of_squares<Float16, HalfSquares<Float16>, kHalfChunk>(data, n);
      break;
  }
  return {sum, !std::isfinite(sum)};
}

}  // namespace memascend
