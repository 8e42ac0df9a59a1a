// SPDX-License-Identifier: Apache-2.0
#include "memascend/pinning.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "memascend/error.hpp"
#include "memascend/thread_pool.hpp"

// Of Linux 5.14; an older kernel refuses it, and mlock touches the pages instead.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace memascend {
namespace {

constexpr const char* kByDriver = "CUDA driver";
// Locked one by one, so that a limit which is reached halfway costs the rest and no more.
constexpr std::uint64_t kLockBytes = std::uint64_t{64} << 20;
// What one thread touches at a time: whole huge pages.
constexpr std::uint64_t kTouchBytes = std::uint64_t{16} << 20;

// Pages lie on the memory node of the thread that touches them first: several threads share the
// work, and spread the arena over the nodes they run on. Contents do not change.
void touch(std::byte* begin, std::uint64_t nbytes) {
  auto one = [&](std::uint64_t chunk) noexcept {
    const std::uint64_t at = chunk * kTouchBytes;
    ::madvise(begin + at, std::min(kTouchBytes, nbytes - at), MADV_POPULATE_WRITE);
  };
  kernel_pool().parallel_for((nbytes + kTouchBytes - 1) / kTouchBytes, one);
}

std::string limit_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return " (the limit of locked memory is " + grouped(limit.rlim_cur) +
         " bytes; raise it with `ulimit -l`, LimitMEMLOCK= of the systemd unit, or `--ulimit"
         " memlock=-1` of the container)";
}

// 0, or the errno of the refusal. The limit is asked before a page is touched (locking on fault
// takes none), and the pages are touched before they are locked: mlock alone takes several times as
// long for huge pages.
int lock(std::byte* begin, std::uint64_t nbytes) {
  if (::mlock2(begin, nbytes, MLOCK_ONFAULT) != 0 && errno != ENOSYS) {
    const int error = errno;
    ::munlock(begin, nbytes);
    return error;
  }
  touch(begin, nbytes);
  if (::mlock(begin, nbytes) == 0) return 0;
  const int error = errno;
  // A refused mlock may leave a part locked and resident: let go of both.
  ::munlock(begin, nbytes);
  ::madvise(begin, nbytes, MADV_DONTNEED);
  return error;
}

// The same reason for the next piece is one refusal of more bytes.
void refuse(PinnedRegion& region, Rung rung, std::uint64_t nbytes, const std::string& reason) {
  if (!region.refusals.empty()) {
    Refusal& last = region.refusals.back();
    if (last.rung == rung && last.reason == reason) {
      last.nbytes += nbytes;
      return;
    }
  }
  region.refusals.push_back({rung, nbytes, reason});
}

void lock_region(PinnedRegion& region, std::uint64_t& lockable_bytes, bool required) {
  for (std::uint64_t at = 0; at < region.nbytes; at += kLockBytes) {
    const std::uint64_t length = std::min(kLockBytes, region.nbytes - at);
    std::string reason = "cannot lock " + grouped(length) + " bytes in memory: ";
    int error = ENOMEM;
    if (length > lockable_bytes) {
      reason += "the machine or its cgroup has room for " + grouped(lockable_bytes) +
                " bytes; lower the capacity or raise the limit of the cgroup";
    } else if (error = lock(region.begin + at, length); error == 0) {
      region.locked_bytes += length;
      lockable_bytes -= length;
      continue;
    } else {
      reason += errno_text(error) + limit_text();
    }
    if (required) throw SystemError(error, reason);
    refuse(region, Rung::kMlock, length, reason);
  }
}

}  // namespace

const char* name_of(Rung rung) noexcept {
  switch (rung) {
    case Rung::kDevice:
      return "device";
    case Rung::kMlock:
      return "mlock";
    case Rung::kPageable:
      break;
  }
  return "pageable";
}

Rung PinnedRegion::rung() const noexcept {
  if (!registered_by.empty()) return Rung::kDevice;
  return locked_bytes == nbytes ? Rung::kMlock : Rung::kPageable;
}

std::string PinnedRegion::reason() const {
  const Rung reached = rung();
  // The nearest rung first: what keeps memory pageable matters more than what keeps it from a
  // device.
  for (const Rung missed : {Rung::kMlock, Rung::kDevice})
    for (const Refusal& refusal : refusals)
      if (refusal.rung == missed && missed > reached) return refusal.reason;
  return {};
}

Pinning::Pinning(std::byte* begin, std::uint64_t nbytes, const PinOptions& options) {
  for (std::uint64_t at = 0; at < nbytes; at += options.region_bytes)
    regions_.push_back({begin + at, std::min(options.region_bytes, nbytes - at), 0, {}, {}});
  if (options.mode == PinMode::kNone) {
    for (PinnedRegion& region : regions_)
      refuse(region, Rung::kMlock, region.nbytes, "not asked for");
    return;
  }
  if (options.mode == PinMode::kDevice) {
    try {
      driver_ = CudaDriver::open(options.cuda_ordinal);
    } catch (const CudaError& error) {
      for (PinnedRegion& region : regions_)
        refuse(region, Rung::kDevice, region.nbytes, error.what());
    }
    if (driver_ != nullptr) register_each(*driver_);
  }
  lock_each(options);
}

Pinning::~Pinning() {
  for (const PinnedRegion& region : regions_)
    if (registered_here(region)) driver_->unregister_host(region.begin);
}

std::vector<PinnedRegion> Pinning::regions() const {
  const std::lock_guard guard(mutex_);
  return regions_;
}

void Pinning::register_with(const std::shared_ptr<CudaDriver>& driver) {
  const std::lock_guard guard(mutex_);
  if (driver_ == nullptr) driver_ = driver;
  register_each(*driver_);
}

void Pinning::register_each(CudaDriver& driver) {
  for (PinnedRegion& region : regions_) {
    if (!region.registered_by.empty()) continue;
    touch(region.begin, region.nbytes);
    try {
      driver.register_host(region.begin, region.nbytes);
      region.registered_by = kByDriver;
    } catch (const CudaError& error) {
      refuse(region, Rung::kDevice, region.nbytes, error.what());
    }
  }
}

void Pinning::lock_each(const PinOptions& options) {
  std::uint64_t lockable_bytes = options.lockable_bytes;
  for (PinnedRegion& region : regions_) {
    if (!region.registered_by.empty())
      lockable_bytes -= std::min(lockable_bytes, region.nbytes);
    else
      lock_region(region, lockable_bytes, options.mode == PinMode::kMlock);
  }
}

void Pinning::note_registered(std::size_t index, std::string by) {
  const std::lock_guard guard(mutex_);
  PinnedRegion& region = regions_.at(index);
  if (!region.registered_by.empty())
    throw std::logic_error("region " + std::to_string(index) + " is registered by " +
                           region.registered_by + " already");
  if (by.empty() || by == kByDriver)
    throw std::invalid_argument("a registration needs the name of who made it");
  region.registered_by = std::move(by);
}

void Pinning::note_unregistered(std::size_t index) {
  const std::lock_guard guard(mutex_);
  PinnedRegion& region = regions_.at(index);
  if (region.registered_by.empty() || registered_here(region))
    throw std::logic_error("region " + std::to_string(index) + " is not registered elsewhere");
  region.registered_by.clear();
}

void Pinning::note_refused(std::size_t index, std::string reason) {
  const std::lock_guard guard(mutex_);
  PinnedRegion& region = regions_.at(index);
  refuse(region, Rung::kDevice, region.nbytes, std::move(reason));
}

bool Pinning::registered_elsewhere() const {
  const std::lock_guard guard(mutex_);
  return std::any_of(regions_.begin(), regions_.end(), [&](const PinnedRegion& region) {
    return !region.registered_by.empty() && !registered_here(region);
  });
}

bool Pinning::registered_here(const PinnedRegion& region) const {
  return region.registered_by == kByDriver;
}

}  // namespace memascend
