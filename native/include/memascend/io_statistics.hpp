// SPDX-License-Identifier: Apache-2.0
// What one member has done: bytes, requests, how long they took, how many were in flight.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "memascend/io_backend.hpp"

namespace memascend {

// Bucket 0: below a microsecond; bucket k: from 2^(k-1) up to 2^k microseconds; the last: all
// above.
inline constexpr std::size_t kLatencyBuckets = 32;
using LatencyHistogram = std::array<std::uint64_t, kLatencyBuckets>;

struct DirectionStatistics {
  std::uint64_t bytes, requests;
  LatencyHistogram latency;  // from the start of a request to its end
};

struct MemberStatistics {
  DirectionStatistics read, write;
  std::uint64_t urgent_requests, short_transfers, retries, failures, cancelled_bytes;
  double busy_seconds;  // with at least one request in flight
  double queue_depth;   // requests in flight, on average over the busy time
  std::uint32_t queue_depth_max;
};

// Threading: one thread counts, any thread may look.
class StatisticsCounter {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  void ended(const Request& request, std::int64_t result, Nanoseconds took) noexcept;
  // `in_flight` requests were in flight during that time.
  void passed(Nanoseconds time, std::uint32_t in_flight) noexcept;
  void short_transfer() noexcept { add(short_transfers_, 1); }
  void retry() noexcept { add(retries_, 1); }
  void failure() noexcept { add(failures_, 1); }
  void cancelled(std::uint64_t nbytes) noexcept { add(cancelled_bytes_, nbytes); }

  MemberStatistics look() const noexcept;

 private:
  using Count = std::atomic<std::uint64_t>;
  struct PerDirection {
    Count bytes{0}, requests{0};
    std::array<Count, kLatencyBuckets> latency{};
  };

  // With one writer no read-modify-write of the processor is needed.
  static void add(Count& count, std::uint64_t more) noexcept {
    count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }
  static DirectionStatistics look(const PerDirection& counts) noexcept;

  PerDirection read_, write_;
  Count urgent_requests_{0}, short_transfers_{0}, retries_{0}, failures_{0}, cancelled_bytes_{0};
  Count busy_ns_{0}, depth_ns_{0}, depth_max_{0};
};

}  // namespace memascend
