// SPDX-License-Identifier: Apache-2.0
// Which instruction set the kernels use, chosen at run time.
#pragma once

#include <string>

namespace memascend {

enum class Isa { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

const char* isa_name(Isa isa) noexcept;

// The best that this processor and operating system support.
Isa best_isa() noexcept;

// What the kernels use now: the best, unless `use_isa` chose a lesser one.
Isa current_isa() noexcept;

// Makes the kernels use the named set ("scalar", "avx2", "avx512"), for tests and for comparison.
// Throws std::invalid_argument when the name is unknown or the processor lacks it.
void use_isa(const std::string& name);

}  // namespace memascend
