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

struct SquareSum {
  double sum;      // of squares in double precision; inf or nan when any element is
  bool nonfinite;  // whether any element is inf or nan
};

// One pass, no temporaries. A finite float32's square cannot overflow a double, so the sum tells
// whether an element was not finite and no second look is needed. Squares of halves are added in
// float32 eight at a time: off by two ten-millionths at most.
SquareSum norm_squared(const void* data, FloatType type, std::uint64_t n);

// The exclusive or of all whole 8-byte words: what reading alone takes, to measure others against.
std::uint64_t read_words(const void* data, std::uint64_t nbytes);

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
