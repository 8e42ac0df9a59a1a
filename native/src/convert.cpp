// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>

#include "float_formats.hpp"
#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"
#include "multi_isa.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kChunk = 131072;

struct Args {
  void* dst;
  const void* src;
  std::uint64_t n;
};

template <typename To, typename From>
struct ConvertLoop {
  static MEMASCEND_INLINE void run(const Args& args) noexcept {
    auto* __restrict dst = static_cast<typename To::Storage*>(args.dst);
    const auto* __restrict src = static_cast<const typename From::Storage*>(args.src);
    const std::uint64_t n = args.n;
    for (std::uint64_t i = 0; i < n; ++i) dst[i] = To::store(From::load(src[i]));
  }
};

template <typename To, typename From>
void convert(typename To::Storage* dst, const typename From::Storage* src, std::uint64_t n) {
  const auto loop = Compiled<ConvertLoop<To, From>, Args>::best();
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    loop({dst + at, src + at, std::min(kChunk, n - at)});
  };
  kernel_pool().parallel_for((n + kChunk - 1) / kChunk, one);
}

}  // namespace

FloatType float_type_named(const std::string& name) {
  if (name == "float32") return FloatType::kFloat32;
  if (name == "bfloat16") return FloatType::kBfloat16;
  if (name == "float16") return FloatType::kFloat16;
  throw std::invalid_argument("unknown dtype '" + name + "'; known are float32, bfloat16, float16");
}

std::uint64_t item_bytes(FloatType type) noexcept {
  return type == FloatType::kFloat32 ? sizeof(float) : sizeof(std::uint16_t);
}

void to_bfloat16(std::uint16_t* dst, const float* src, std::uint64_t n) {
  convert<Bfloat16, Float32>(dst, src, n);
}

void to_float16(std::uint16_t* dst, const float* src, std::uint64_t n) {
  convert<Float16, Float32>(dst, src, n);
}

void to_float32(float* dst, const void* src, FloatType src_type, std::uint64_t n) {
  const auto* halves = static_cast<const std::uint16_t*>(src);
  switch (src_type) {
    case FloatType::kFloat32:
      return convert<Float32, Float32>(dst, static_cast<const float*>(src), n);
    case FloatType::kBfloat16:
      return convert<Float32, Bfloat16>(dst, halves, n);
    case FloatType::kFloat16:
      return convert<Float32, Float16>(dst, halves, n);
  }
}

}  // namespace memascend
