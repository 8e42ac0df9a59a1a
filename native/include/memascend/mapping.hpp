// SPDX-License-Identifier: Apache-2.0
// Anonymous memory that stays in place: one mapping, exactly sized, pinned as well as we may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memascend/pinning.hpp"

namespace memascend {

struct MappingOptions {
  PinOptions pin = {};
  bool huge_pages = true;
  // A multiple of the system's page, for tests of larger ones; 0 is the system's.
  std::uint64_t page_bytes = 0;
};

// One anonymous private mapping of `nbytes` rounded up to whole pages and no further, aligned to
// 2 MiB so that transparent huge pages can back it: a disk takes a bounded number of memory
// segments per request, and 4 KiB pages would split every large request.
//
// A pinned mapping is resident at once; a pageable one as it is touched. Registrations with a
// device are undone before the memory is unmapped. Children of fork do not inherit it (a copied
// page under DMA would corrupt one of the two), and core dumps leave it out (it holds training
// state, and is large).
class Mapping {
 public:
  // Throws SystemError when the memory cannot be mapped, or in PinMode::kMlock not be locked.
  Mapping(std::uint64_t nbytes, const MappingOptions& options);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  std::uint64_t page_bytes() const noexcept { return page_bytes_; }
  Pinning& pinning() const noexcept { return *pinning_; }
  // True when the kernel accepted the advice to use huge pages.
  bool huge_pages() const noexcept { return huge_pages_; }

 private:
  void reserve();

  const std::uint64_t page_bytes_;
  const std::uint64_t nbytes_;
  std::byte* data_ = nullptr;
  bool huge_pages_ = false;
  std::unique_ptr<Pinning> pinning_;
};

std::uint64_t page_bytes() noexcept;

// The smallest multiple of `multiple` that is at least `value`; throws std::length_error when that
// does not fit 64 bits.
std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple);

}  // namespace memascend
