// SPDX-License-Identifier: Apache-2.0
#include "fault_backend.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "memascend/error.hpp"

namespace memascend::testing {

FaultBackend::FaultBackend(int fd, const FaultPlan& plan) : plan_(plan), random_(plan.seed) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) throw SystemError(errno, "cannot open member anew: " + errno_text(errno), path);
}

FaultBackend::~FaultBackend() {
  ::close(fd_);
}

void FaultBackend::start(const Request& request, std::uint32_t tag) noexcept {
  const std::lock_guard lock(mutex_);
  to_do_.push_back({request, tag});
}

// One request per call: the fewer are done at once, the more orders are met.
std::size_t FaultBackend::wait(Completion* out, std::size_t room) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return woken_ || !to_do_.empty(); });
  woken_ = false;
  if (to_do_.empty() || room == 0) return 0;
  const std::size_t chosen = plan_.reorder ? random_() % to_do_.size() : 0;
  const Work work = to_do_[chosen];
  to_do_.erase(to_do_.begin() + static_cast<std::ptrdiff_t>(chosen));
  out[0] = {work.tag, perform(work.request)};
  return 1;
}

void FaultBackend::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

int FaultBackend::sync() noexcept {
  const std::lock_guard lock(mutex_);
  if (crashed_) return EIO;
  if (plan_.fail_sync) return plan_.error_number;
  journal_.clear();
  return 0;
}

void FaultBackend::set_plan(const FaultPlan& plan) {
  const std::lock_guard lock(mutex_);
  plan_ = plan;
  random_.seed(plan.seed);
  writes_ = 0;
}

void FaultBackend::crash() {
  const std::lock_guard lock(mutex_);
  crash_locked();
}

bool FaultBackend::crashed() const {
  const std::lock_guard lock(mutex_);
  return crashed_;
}

std::int64_t FaultBackend::perform(const Request& request) {
  const bool writing = request.direction == Direction::kWrite;
  if (writing && plan_.crash_after_writes != 0 && ++writes_ == plan_.crash_after_writes) {
    // The write under way is torn as well: it enters the journal first.
    write(request, request.nbytes);
    crash_locked();
  }
  if (crashed_) return -EIO;
  const std::uint64_t all =
      request.offset | reinterpret_cast<std::uintptr_t>(request.address) | request.nbytes;
  if (plan_.require_aligned && all % kSector != 0) return -EINVAL;
  if (happens(plan_.error_rate)) return -plan_.error_number;
  if (happens(plan_.interrupt_rate)) return (random_() & 1U) != 0 ? -EINTR : -EAGAIN;
  const bool cut = request.nbytes > 1 && happens(plan_.short_rate);
  const std::uint64_t nbytes = cut ? 1 + random_() % (request.nbytes - 1) : request.nbytes;
  return writing ? write(request, nbytes) : read(request, nbytes);
}

std::int64_t FaultBackend::read(const Request& request, std::uint64_t nbytes) const {
  const ssize_t moved = ::pread(fd_, request.address, nbytes, static_cast<off_t>(request.offset));
  return moved >= 0 ? moved : -errno;
}

std::int64_t FaultBackend::write(const Request& request, std::uint64_t nbytes) {
  const auto offset = static_cast<off_t>(request.offset);
  Written entry{request.offset, std::vector<std::byte>(nbytes), {}};
  if (::pread(fd_, entry.before.data(), nbytes, offset) < 0) return -errno;
  const ssize_t moved = ::pwrite(fd_, request.address, nbytes, offset);
  if (moved < 0) return -errno;
  entry.before.resize(static_cast<std::size_t>(moved));
  entry.after.assign(request.address, request.address + moved);
  journal_.push_back(std::move(entry));
  return moved;
}

// Undoes the journal backwards, then redoes each of its sectors or not.
void FaultBackend::crash_locked() {
  if (crashed_) return;
  crashed_ = true;
  for (auto entry = journal_.rbegin(); entry != journal_.rend(); ++entry)
    if (::pwrite(fd_, entry->before.data(), entry->before.size(),
                 static_cast<off_t>(entry->offset)) < 0)
      return;
  for (const Written& entry : journal_) {
    for (std::uint64_t at = 0; at < entry.after.size();) {
      const std::uint64_t to_boundary = kSector - (entry.offset + at) % kSector;
      const std::uint64_t length = std::min<std::uint64_t>(to_boundary, entry.after.size() - at);
      if ((random_() & 1U) != 0 &&
          ::pwrite(fd_, entry.after.data() + at, length, static_cast<off_t>(entry.offset + at)) < 0)
        return;
      at += length;
    }
  }
  journal_.clear();
}

bool FaultBackend::happens(double rate) {
  return rate > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < rate;
}

}  // namespace memascend::testing
