// SPDX-License-Identifier: Apache-2.0
// One loop, compiled once per instruction set. A kernel is a type with a static, always inlined
// `run(const Args&)` in plain C++; the compiler vectorises it anew inside each wrapper. Function
// attributes, not per-file flags: no inline function of the standard library can be compiled with
// instructions that the machine lacks and then be picked by the linker for everyone.
#pragma once

#include "memascend/isa.hpp"

namespace memascend {

template <typename Kernel, typename Args>
struct Compiled {
  using Function = void (*)(const Args&) noexcept;

  static void baseline(const Args& args) noexcept { Kernel::run(args); }

#if defined(__x86_64__)
  __attribute__((target("avx2"))) static void avx2(const Args& args) noexcept { Kernel::run(args); }

#if defined(__clang__)
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
  static void avx512(const Args& args) noexcept {
    Kernel::run(args);
  }
#endif

  static Function best() noexcept {
#if defined(__x86_64__)
    switch (current_isa()) {
      case Isa::kAvx512:
        return avx512;
      case Isa::kAvx2:
        return avx2;
      case Isa::kScalar:
        break;
    }
#endif
    return baseline;
  }
};

}  // namespace memascend
