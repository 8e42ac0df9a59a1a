// SPDX-License-Identifier: Apache-2.0
#include "memascend/io_statistics.hpp"

#include <algorithm>

namespace memascend {
namespace {

std::size_t bucket_of(std::chrono::nanoseconds took) noexcept {
  auto microseconds = static_cast<std::uint64_t>(std::max<std::int64_t>(took.count(), 0)) / 1000;
  std::size_t bucket = 0;
  for (; microseconds > 0 && bucket + 1 < kLatencyBuckets; microseconds >>= 1U) ++bucket;
  return bucket;
}

std::uint64_t value(const std::atomic<std::uint64_t>& count) noexcept {
  return count.load(std::memory_order_relaxed);
}

}  // namespace

void StatisticsCounter::ended(const Request& request, std::int64_t result,
                              Nanoseconds took) noexcept {
  PerDirection& counts = request.direction == Direction::kRead ? read_ : write_;
  add(counts.requests, 1);
  if (result > 0) add(counts.bytes, static_cast<std::uint64_t>(result));
  add(counts.latency[bucket_of(took)], 1);
  if (request.priority == Priority::kUrgent) add(urgent_requests_, 1);
}

void StatisticsCounter::passed(Nanoseconds time, std::uint32_t in_flight) noexcept {
  if (in_flight == 0 || time.count() <= 0) return;
  const auto ns = static_cast<std::uint64_t>(time.count());
  add(busy_ns_, ns);
  add(depth_ns_, ns * in_flight);
  if (in_flight > value(depth_max_)) depth_max_.store(in_flight, std::memory_order_relaxed);
}

MemberStatistics StatisticsCounter::look() const noexcept {
  const std::uint64_t busy_ns = value(busy_ns_);
  MemberStatistics found{};
  found.read = look(read_);
  found.write = look(write_);
  found.urgent_requests = value(urgent_requests_);
  found.short_transfers = value(short_transfers_);
  found.retries = value(retries_);
  found.failures = value(failures_);
  found.cancelled_bytes = value(cancelled_bytes_);
  found.busy_seconds = static_cast<double>(busy_ns) * 1e-9;
  if (busy_ns > 0)
    found.queue_depth = static_cast<double>(value(depth_ns_)) / static_cast<double>(busy_ns);
  found.queue_depth_max = static_cast<std::uint32_t>(value(depth_max_));
  return found;
}

DirectionStatistics StatisticsCounter::look(const PerDirection& counts) noexcept {
  DirectionStatistics found{value(counts.bytes), value(counts.requests), {}};
  std::transform(counts.latency.begin(), counts.latency.end(), found.latency.begin(), value);
  return found;
}

}  // namespace memascend
