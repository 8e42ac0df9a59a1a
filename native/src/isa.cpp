// SPDX-License-Identifier: Apache-2.0
#include "memascend/isa.hpp"

#include <atomic>
#include <stdexcept>

namespace memascend {
namespace {

std::atomic<Isa>& chosen() noexcept {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

Isa best_isa() noexcept {
#if defined(__x86_64__)
  // These checks include that the operating system saves the wide registers.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kScalar;
}

Isa current_isa() noexcept {
  return chosen().load(std::memory_order_relaxed);
}

void use_isa(const std::string& name) {
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (name != isa_name(isa)) continue;
    if (isa > best_isa())
      throw std::invalid_argument("this processor has no " + name + "; its best is " +
                                  isa_name(best_isa()));
    chosen().store(isa, std::memory_order_relaxed);
    return;
  }
  throw std::invalid_argument("unknown instruction set '" + name +
                              "'; known are scalar, avx2, avx512");
}

}  // namespace memascend
