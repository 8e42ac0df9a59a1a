// SPDX-License-Identifier: Apache-2.0
// How firmly memory is held in place: a ladder of three rungs, climbed region by region.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memascend/cuda_driver.hpp"

namespace memascend {

// kPageable: the kernel may move or swap it. kMlock: it stays in memory. kDevice: registered with a
// device, which copies from and to it by DMA.
enum class Rung : std::uint8_t { kPageable, kMlock, kDevice };

const char* name_of(Rung rung) noexcept;

// kDevice: register with the CUDA driver, what it refuses lock, what the kernel refuses leave
// pageable. kAuto: lock, else leave pageable. kMlock: lock, or throw. kNone: leave pageable.
enum class PinMode : std::uint8_t { kAuto, kDevice, kMlock, kNone };

// The most that io_uring registers as one buffer; one size for all who register.
inline constexpr std::uint64_t kRegionBytes = std::uint64_t{1} << 30;

struct PinOptions {
  PinMode mode = PinMode::kAuto;
  // Locked memory cannot be reclaimed: no more is locked than the machine and its cgroup have room
  // for, which the caller knows.
  std::uint64_t lockable_bytes = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t region_bytes = kRegionBytes;
  int cuda_ordinal = 0;
};

struct Refusal {
  Rung rung;
  std::uint64_t nbytes;
  std::string reason;
};

// A piece of at most `region_bytes`, registered as a whole or not at all, locked in smaller pieces.
struct PinnedRegion {
  std::byte* begin;
  std::uint64_t nbytes;
  std::uint64_t locked_bytes = 0;
  std::string registered_by;  // empty: not registered
  std::vector<Refusal> refusals;

  Rung rung() const noexcept;
  // Why no higher rung was reached of those that were tried; empty when the highest was.
  std::string reason() const;
};

// The pinning of one mapping, undone by the destructor, which must run before the memory is
// unmapped and after its last reader.
//
// Threading: every method may be called from any thread.
class Pinning {
 public:
  // Memory that is pinned is resident when this returns, touched first by several threads.
  // Throws SystemError in mode kMlock when the kernel refuses.
  Pinning(std::byte* begin, std::uint64_t nbytes, const PinOptions& options);
  ~Pinning();
  Pinning(const Pinning&) = delete;
  Pinning& operator=(const Pinning&) = delete;

  std::vector<PinnedRegion> regions() const;

  // Registers what is not registered yet; refusals are kept, not thrown.
  void register_with(const std::shared_ptr<CudaDriver>& driver);

  // Somebody else registered a region, refused to, or has undone it. Throws std::out_of_range, and
  // std::logic_error when the region's state does not allow it.
  void note_registered(std::size_t index, std::string by);
  void note_unregistered(std::size_t index);
  void note_refused(std::size_t index, std::string reason);
  // True while a region is registered by somebody else, who must undo it first.
  bool registered_elsewhere() const;

 private:
  void register_each(CudaDriver& driver);
  void lock_each(const PinOptions& options);
  bool registered_here(const PinnedRegion& region) const;

  mutable std::mutex mutex_;
  std::vector<PinnedRegion> regions_;
  std::shared_ptr<CudaDriver> driver_;
};

}  // namespace memascend
