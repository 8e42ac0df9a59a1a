// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace memascend {

// Raised with every change of the Python bindings. memascend_jax/_native/__init__.py holds the same
// number, so that a source tree never runs on the compiled module of another version.
inline constexpr int kSourceVersion = 7;

}  // namespace memascend
