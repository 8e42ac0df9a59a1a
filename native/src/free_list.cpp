// SPDX-License-Identifier: Apache-2.0
#include "memascend/free_list.hpp"

#include <iterator>
#include <stdexcept>

namespace memascend {

FreeList::FreeList(std::uint64_t capacity) : capacity_(capacity) {
  if (capacity > 0) insert(0, capacity);
}

std::optional<std::uint64_t> FreeList::take(std::uint64_t length) {
  const auto fit = by_length_.lower_bound({length, 0});
  if (length == 0 || fit == by_length_.end()) return std::nullopt;
  const auto [piece_length, offset] = *fit;
  erase(by_offset_.find(offset));
  if (piece_length > length) insert(offset + length, piece_length - length);
  return offset;
}

void FreeList::give(std::uint64_t offset, std::uint64_t length) {
  if (length == 0 || offset > capacity_ || length > capacity_ - offset)
    throw std::logic_error("returned piece lies outside the range");
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first < offset + length)
    throw std::logic_error("returned piece is already free");
  std::uint64_t begin = offset;
  std::uint64_t end = offset + length;
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    const std::uint64_t before_end = before->first + before->second;
    if (before_end > offset) throw std::logic_error("returned piece is already free");
    if (before_end == offset) {
      begin = before->first;
      erase(before);
    }
  }
  if (next != by_offset_.end() && next->first == end) {
    end += next->second;
    erase(next);
  }
  insert(begin, end - begin);
}

std::uint64_t FreeList::largest_free() const noexcept {
  return by_length_.empty() ? 0 : by_length_.rbegin()->first;
}

void FreeList::insert(std::uint64_t offset, std::uint64_t length) {
  by_offset_.emplace(offset, length);
  by_length_.emplace(length, offset);
  free_total_ += length;
}

void FreeList::erase(Piece piece) {
  by_length_.erase({piece->second, piece->first});
  free_total_ -= piece->second;
  by_offset_.erase(piece);
}

}  // namespace memascend
