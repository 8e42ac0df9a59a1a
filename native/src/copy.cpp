// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace memascend {
namespace {

constexpr std::uint64_t kChunk = std::uint64_t{1} << 20;
// Below this the copy is likely to be read again soon, and fits a cache.
constexpr std::uint64_t kStreamFrom = std::uint64_t{4} << 20;

#if defined(__x86_64__)

void stream(std::byte* dst, const std::byte* src, std::uint64_t nbytes) noexcept {
  constexpr std::uint64_t kLine = 64;
  const std::uint64_t misalignment = reinterpret_cast<std::uintptr_t>(dst) % kLine;
  const std::uint64_t head = std::min(nbytes, misalignment == 0 ? 0 : kLine - misalignment);
  std::memcpy(dst, src, head);
  std::uint64_t at = head;
  for (; at + kLine <= nbytes; at += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + at, src + at, nbytes - at);
  // Streaming stores are weakly ordered; the fence makes them visible before the job is done.
  _mm_sfence();
}

#else

void stream(std::byte* dst, const std::byte* src, std::uint64_t nbytes) noexcept {
  std::memcpy(dst, src, nbytes);
}

#endif

}  // namespace

void copy_bytes(std::byte* dst, const std::byte* src, std::uint64_t nbytes) {
  if (nbytes == 0) return;
  const bool large = nbytes >= kStreamFrom;
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kChunk;
    const std::uint64_t length = std::min(kChunk, nbytes - at);
    if (large)
      stream(dst + at, src + at, length);
    else
      std::memcpy(dst + at, src + at, length);
  };
  kernel_pool().parallel_for((nbytes + kChunk - 1) / kChunk, one);
}

}  // namespace memascend
