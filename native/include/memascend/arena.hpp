// SPDX-License-Identifier: Apache-2.0
// The only owner of pinned memory, and the slots it hands out.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memascend/free_list.hpp"
#include "memascend/mapping.hpp"

namespace memascend {

class Slot;

// One mapping from which page-aligned slots of exact size are taken (best fit).
//
// Threading: every method may be called from any thread.
// Lifetime: slots, their views and their exports keep the memory mapped; `close` refuses while any
// slot is outstanding.
class PinnedArena : public std::enable_shared_from_this<PinnedArena> {
 public:
  static std::shared_ptr<PinnedArena> create(std::uint64_t capacity_bytes,
                                             const MappingOptions& options);
  static std::shared_ptr<PinnedArena> create(std::uint64_t capacity_bytes, PinMode pin,
                                             bool huge_pages);
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;

  // A slot of `nbytes` (rounded up to pages inside the arena). Throws ArenaFull with the numbers
  // when no free piece holds it, std::logic_error after `close`.
  std::shared_ptr<Slot> allocate(std::uint64_t nbytes, std::string label);

  // Refuses new slots and gives the mapping up. Throws std::logic_error naming the outstanding
  // slots' bytes, or when somebody else has registered a region and not undone it; closing twice is
  // harmless.
  void close();

  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  std::uint64_t in_use_bytes() const;
  std::uint64_t high_water_bytes() const;
  std::uint64_t largest_free_bytes() const;
  std::uint64_t page_bytes() const noexcept { return page_bytes_; }
  bool huge_pages() const noexcept { return huge_pages_; }

  // The lowest rung of all regions, which is what holds for the arena as a whole, and why not a
  // higher one of those that were tried: empty when the highest was reached.
  Rung rung() const;
  std::string pinning_reason() const;

  // The mapping in pieces of at most 1 GiB, which is the most that io_uring registers as one
  // buffer. Empty after `close`.
  std::vector<std::pair<std::byte*, std::uint64_t>> regions() const;
  std::vector<PinnedRegion> pinned_regions() const;

  // As of Pinning; each throws std::logic_error after `close`.
  void register_with(const std::shared_ptr<CudaDriver>& driver);
  void note_registered(std::size_t region, std::string by);
  void note_unregistered(std::size_t region);
  void note_refused(std::size_t region, std::string reason);

  // A counter that moves when the last reader of a slot goes, or when `advance_epoch` is called.
  // Waiting for it to leave `seen` returns the newest value, or `seen` after the time-out.
  std::uint64_t epoch() const;
  void advance_epoch() noexcept;
  std::uint64_t wait_epoch(std::uint64_t seen, std::chrono::nanoseconds timeout) const;

 private:
  friend class Slot;

  explicit PinnedArena(std::shared_ptr<Mapping> mapping);
  std::shared_ptr<Mapping> open_mapping() const;
  void take_back(std::uint64_t offset, std::uint64_t length) noexcept;

  mutable std::mutex mutex_;
  std::shared_ptr<Mapping> mapping_;
  FreeList free_;
  std::uint64_t high_water_bytes_ = 0;

  const std::uint64_t capacity_bytes_;
  const std::uint64_t page_bytes_;
  const bool huge_pages_;

  mutable std::mutex epoch_mutex_;
  mutable std::condition_variable epoch_moved_;
  std::uint64_t epoch_ = 0;
};

// The arena cannot hold the slot that was asked for.
class ArenaFull : public std::bad_alloc {
 public:
  explicit ArenaFull(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// A piece of the arena. Held by shared_ptr: its handle, views and exports share it, and the piece
// goes back to the arena at `release` or with the last of them.
class Slot {
 public:
  Slot(std::shared_ptr<PinnedArena> arena, std::shared_ptr<Mapping> mapping, std::uint64_t offset,
       std::uint64_t nbytes, std::string label);
  ~Slot();
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  // Throws std::logic_error once the slot is released.
  std::byte* data() const;
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  const std::string& label() const noexcept { return label_; }
  bool released() const noexcept { return released_.load(std::memory_order_acquire); }

  // The start of [offset, offset + length); throws std::out_of_range when it leaves the slot.
  std::byte* at(std::uint64_t offset, std::uint64_t length) const;

  // Gives the memory back now. Throws std::logic_error while readers are alive; releasing twice is
  // harmless.
  void release();

  int readers() const noexcept { return readers_.load(std::memory_order_acquire); }
  void add_reader() noexcept { readers_.fetch_add(1, std::memory_order_acq_rel); }
  void remove_reader() noexcept;
  // True when no reader is left, false when the time ran out first.
  bool wait_no_readers(std::chrono::nanoseconds timeout) const;

 private:
  const std::shared_ptr<PinnedArena> arena_;
  const std::shared_ptr<Mapping> mapping_;
  const std::uint64_t offset_;
  const std::uint64_t nbytes_;
  const std::string label_;
  std::atomic<bool> released_{false};
  std::atomic<int> readers_{0};
};

}  // namespace memascend
