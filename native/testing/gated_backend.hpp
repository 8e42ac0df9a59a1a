// SPDX-License-Identifier: Apache-2.0
// A backend whose requests end when the test says so: order, depth and cancellation become visible.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "memascend/io_backend.hpp"

namespace memascend::testing {

// Moves no bytes: every request ends as complete, or with `result` where one is given.
class GatedBackend final : public IoBackend {
 public:
  const char* name() const noexcept override { return "gated"; }

  void start(const Request& request, std::uint32_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    started_.push_back(request);
    waiting_.emplace_back(tag, static_cast<std::int64_t>(request.nbytes));
    begun_.notify_all();
    changed_.notify_all();
  }

  std::size_t wait(Completion* out, std::size_t room) noexcept override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return woken_ || (allowed_ > 0 && !waiting_.empty()); });
    woken_ = false;
    std::size_t count = 0;
    for (; count < room && allowed_ > 0 && !waiting_.empty(); --allowed_) {
      out[count++] = {waiting_.front().first, waiting_.front().second};
      waiting_.pop_front();
    }
    return count;
  }

  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

  int sync() noexcept override { return 0; }

  // The oldest `count` requests that are or will be in flight end.
  void allow(std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    allowed_ += count;
    changed_.notify_all();
  }
  void allow_all() { allow(std::uint64_t{1} << 40); }

  // All requests begun so far, in order, once there are at least `count`.
  std::vector<Request> begun(std::size_t count) {
    std::unique_lock lock(mutex_);
    begun_.wait(lock, [&] { return started_.size() >= count; });
    return started_;
  }

  // The oldest request in flight will end with this result.
  void spoil(std::int64_t result) {
    const std::lock_guard lock(mutex_);
    waiting_.front().second = result;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable begun_;
  std::vector<Request> started_;
  std::deque<std::pair<std::uint32_t, std::int64_t>> waiting_;
  std::uint64_t allowed_ = 0;
  bool woken_ = false;
};

}  // namespace memascend::testing
