// SPDX-License-Identifier: Apache-2.0
// How a batch of reads or writes ends: its ticket, its failure, and failures nobody looked at.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memascend/error.hpp"
#include "memascend/io_backend.hpp"

namespace memascend {

// The first thing that went wrong in a batch.
struct IoFailure {
  Direction direction;
  std::uint32_t member;
  std::uint64_t offset;
  std::uint64_t nbytes;  // asked for at that offset
  std::uint64_t moved;   // of them, before it went wrong
  int error_number;      // 0: the file ended
  std::string path;

  SystemError error() const;
};

// When one member moved its part of a batch: from the start of its first request to the end of its
// last, by steady_clock.
struct MemberSpan {
  using Time = std::chrono::steady_clock::time_point;

  std::uint64_t nbytes = 0;
  Time begun{};
  Time ended{};
};

class Ticket;

// Failed writes whose ticket nobody has waited for. `IoEngine::flush` and `close` throw the first:
// a write error that was not looked at must not end in a commit.
class FailureLog {
 public:
  void add(const Ticket* ticket, IoFailure failure) noexcept;
  void observed(const Ticket* ticket) noexcept;
  std::optional<IoFailure> take() noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::pair<const Ticket*, IoFailure>> failures_;
};

// The end of a batch. Completes even when the engine is closed or destroyed first.
class Ticket {
 public:
  Ticket(std::uint64_t nbytes, std::shared_ptr<FailureLog> log,
         Direction direction = Direction::kRead, std::size_t members = 0);
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Whether the batch has ended within `timeout`; does not throw its failure.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  // Sleeps until every byte has moved. Throws SystemError of the first failure, at every call.
  void wait();

  Direction direction() const noexcept { return direction_; }
  MemberSpan::Time submitted() const noexcept { return submitted_; }
  // What each member did for this batch, by its index; to be read when the batch is done.
  const std::vector<MemberSpan>& spans() const noexcept { return spans_; }

 private:
  friend class Lane;

  // These are called by the threads of the members. `fail` comes before the `progress` of its
  // bytes, and so does `moved`, whose member's thread alone touches that member's span.
  void begin(std::uint32_t member, MemberSpan::Time now) noexcept;
  void moved(std::uint32_t member, std::uint64_t nbytes, MemberSpan::Time now) noexcept;
  void progress(std::uint64_t nbytes) noexcept;
  void fail(const IoFailure& failure) noexcept;
  // As `fail`, but whoever cancels knows that the bytes did not move: nobody else is reminded.
  void cancel(const IoFailure& failure) noexcept;
  bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }
  bool note(const IoFailure& failure) noexcept;
  void finish() noexcept;

  const std::uint64_t nbytes_;
  const std::shared_ptr<FailureLog> log_;
  const Direction direction_;
  const MemberSpan::Time submitted_ = std::chrono::steady_clock::now();
  std::vector<MemberSpan> spans_;
  std::atomic<std::uint64_t> pending_;
  std::atomic<bool> failed_{false};
  std::optional<IoFailure> failure_;  // guarded by mutex_
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
};

}  // namespace memascend
