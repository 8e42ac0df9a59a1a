// SPDX-License-Identifier: Apache-2.0
// One member of a store: its queue, its backend, and the thread that moves requests between them.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memascend/device_limits.hpp"
#include "memascend/io_backend.hpp"
#include "memascend/io_statistics.hpp"
#include "memascend/io_ticket.hpp"

namespace memascend {

// A contiguous piece of a member and the memory it is read into or written from.
struct Segment {
  std::uint32_t member;
  std::uint64_t offset;
  std::byte* address;
  std::uint64_t nbytes;
};

struct LaneOptions {
  std::uint32_t member = 0;
  int fd = -1;  // not owned
  std::string path;
  std::uint32_t queue_depth = 8;  // requests of request_bytes
  std::uint64_t request_bytes = 4U << 20;
};

// Cuts segments into requests that fit the device and keeps up to `queue_depth` of them in flight,
// or more when they are smaller: a disk that a few large requests keep busy needs many small ones.
// Urgent ones go first, and a few more of them, so that they need not wait for a full queue to
// drain.
//
// Threading: every method may be called from any thread; `stop` once.
class Lane {
 public:
  Lane(const LaneOptions& options, std::unique_ptr<IoBackend> backend);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Queues those of the segments that are of this member. Waits for room when kMaxQueued are
  // waiting already.
  void push(const std::shared_ptr<Ticket>& ticket, Direction direction, Priority priority,
            const std::vector<Segment>& segments);

  // From here on nothing is begun any more: what is queued, or comes, fails with ECANCELED.
  void cancel() noexcept;
  // Ends the thread after all that is queued and in flight; nothing may be pushed any more.
  void begin_stop() noexcept;
  void finish_stop() noexcept;

  const IoBackend& backend() const noexcept { return *backend_; }
  int sync() noexcept { return backend_->sync(); }
  MemberStatistics statistics() const noexcept { return statistics_.look(); }
  const std::string& path() const noexcept { return path_; }
  const DeviceLimits& limits() const noexcept { return limits_; }
  std::uint64_t request_bytes() const noexcept { return request_bytes_; }

  static constexpr std::size_t kMaxQueued = 8192;
  // How many small requests are in flight where one of request_bytes would be: a disk that 32 MiB
  // in large requests keep busy was fastest with 128 random reads of 8 KiB.
  static constexpr std::uint32_t small_per_large(std::uint64_t request_bytes) noexcept {
    constexpr std::uint64_t kSmallBytes = std::uint64_t{256} << 10;
    constexpr std::uint64_t kMost = 16;
    const std::uint64_t fit = request_bytes / kSmallBytes;
    return static_cast<std::uint32_t>(fit < 1 ? 1 : fit > kMost ? kMost : fit);
  }
  // How many urgent requests are in flight beyond the depth.
  static constexpr std::uint32_t urgent_reserve(std::uint32_t queue_depth) noexcept {
    return queue_depth / 4 + 1;
  }
  // How many requests of any kind are in flight at most.
  static constexpr std::uint32_t most_in_flight(std::uint32_t queue_depth,
                                                std::uint64_t request_bytes) noexcept {
    return small_per_large(request_bytes) * (queue_depth + urgent_reserve(queue_depth));
  }

 private:
  using Clock = std::chrono::steady_clock;

  // A segment on its way, cut into requests from the front.
  struct Transfer {
    std::shared_ptr<Ticket> ticket;
    Direction direction;
    std::uint64_t offset;
    std::byte* address;
    std::uint64_t nbytes;
  };
  // A request on its way; after a short transfer its front is cut off and the rest started again.
  struct Flight {
    std::shared_ptr<Ticket> ticket;
    Request request;
    std::uint64_t begin;   // offset at which the request first began
    std::uint64_t nbytes;  // that it first had
    std::uint64_t block;   // transfers resume at multiples of this
    std::uint32_t retries;
    Clock::time_point started;
  };
  struct Queue {
    std::deque<Transfer> transfers;
    bool wakes = false;  // whether the thread sleeps and could start one of these
  };

  void run() noexcept;
  bool feed() noexcept;
  bool next_request(Priority priority) noexcept;
  bool has_room(Priority priority) const noexcept;
  void drop_queued() noexcept;
  void complete(const Completion& completion) noexcept;
  void retire(std::uint32_t tag) noexcept;
  void fail(const Flight& flight, std::uint64_t moved, int error_number) noexcept;
  void pass_time(std::uint32_t in_flight) noexcept;
  Queue& queue_of(Priority priority) noexcept {
    return queues_[priority == Priority::kUrgent ? 0 : 1];
  }

  const std::uint32_t member_;
  const std::string path_;
  const std::uint32_t queue_depth_;
  const std::uint32_t small_per_large_;
  const DeviceLimits limits_;
  const std::uint64_t request_bytes_;
  const std::unique_ptr<IoBackend> backend_;
  StatisticsCounter statistics_;

  std::mutex mutex_;
  std::condition_variable room_;
  std::array<Queue, 2> queues_;
  bool cancelling_ = false;
  bool stopping_ = false;

  // The lane's thread alone uses these.
  std::vector<Flight> flights_;
  std::vector<std::uint32_t> free_tags_;
  std::vector<std::uint32_t> to_start_;
  std::uint32_t in_flight_ = 0;
  std::uint64_t bytes_in_flight_ = 0;  // as first asked for
  Clock::time_point now_ = Clock::now();

  std::thread thread_;
};

}  // namespace memascend
