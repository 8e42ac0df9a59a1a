// SPDX-License-Identifier: Apache-2.0
// The bookkeeping of an address range: which pieces are free. Holds no memory and takes no lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace memascend {

// Best fit with coalescing over [0, capacity). Offsets and lengths are in the caller's granule.
// Allocation and return are O(log pieces). Fragmentation is possible and is reported as the
// difference between `free_total` and `largest_free`; slots are meant to be taken once, at start.
class FreeList {
 public:
  explicit FreeList(std::uint64_t capacity);

  // The offset of `length` units from the smallest free piece that holds them (the lowest such
  // piece among equals), or nothing when no piece does. `length` must be positive.
  std::optional<std::uint64_t> take(std::uint64_t length);

  // Returns [offset, offset + length) and merges it with free neighbours. Throws std::logic_error
  // when any of it is already free or lies outside the range: a double return would hand the same
  // memory to two owners.
  void give(std::uint64_t offset, std::uint64_t length);

  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint64_t free_total() const noexcept { return free_total_; }
  std::uint64_t largest_free() const noexcept;
  std::size_t pieces() const noexcept { return by_offset_.size(); }

 private:
  using Piece = std::map<std::uint64_t, std::uint64_t>::iterator;

  void insert(std::uint64_t offset, std::uint64_t length);
  void erase(Piece piece);

  std::uint64_t capacity_;
  std::uint64_t free_total_ = 0;
  std::map<std::uint64_t, std::uint64_t> by_offset_;             // offset -> length
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_length_;  // (length, offset)
};

}  // namespace memascend
