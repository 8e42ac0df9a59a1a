// SPDX-License-Identifier: Apache-2.0
// Anonymous memory that stays in place: one mapping, exactly sized, pinned as well as we may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memascend {

enum class PinMode { kAuto, kMlock, kNone };

// One anonymous private mapping of `nbytes` rounded up to whole pages and no further, aligned to
// 2 MiB so that transparent huge pages can back it: a disk takes a bounded number of memory
// segments per request, and 4 KiB pages would split every large request.
//
// kMlock throws SystemError when the kernel refuses; kAuto falls back to pageable memory and keeps
// the reason. A pinned mapping is resident at once; a pageable one as it is touched.
// Children of fork do not inherit it (a copied page under DMA would corrupt one of the two), and
// core dumps leave it out (it holds training state, and is large).
class Mapping {
 public:
  Mapping(std::uint64_t nbytes, PinMode pin, bool huge_pages);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool pinned() const noexcept { return pinned_; }
  // Why the mapping is pageable; empty when it is pinned.
  const std::string& pinning_reason() const noexcept { return pinning_reason_; }
  // True when the kernel accepted the advice to use huge pages.
  bool huge_pages() const noexcept { return huge_pages_; }

 private:
  void reserve();
  void pin(PinMode mode);

  std::byte* data_ = nullptr;
  std::uint64_t nbytes_;
  bool pinned_ = false;
  bool huge_pages_ = false;
  std::string pinning_reason_;
};

std::uint64_t page_bytes() noexcept;

// The smallest multiple of `multiple` that is at least `value`; throws std::length_error when that
// does not fit 64 bits.
std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple);

}  // namespace memascend
