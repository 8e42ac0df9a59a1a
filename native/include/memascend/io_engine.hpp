// SPDX-License-Identifier: Apache-2.0
// Batched asynchronous reads and writes over the members of a store.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memascend/io_backend.hpp"
#include "memascend/io_lane.hpp"
#include "memascend/io_ticket.hpp"

namespace memascend {

struct IoOptions {
  std::vector<int> fds;           // not owned; duplicated
  std::string backend = "auto";   // "auto", "io_uring", "threads"
  std::uint32_t queue_depth = 8;  // requests of request_bytes in flight per member
  std::uint64_t request_bytes = 4U << 20;
  std::uint32_t threads = 4;  // of the thread backend, per member
  std::vector<Region> regions;
};

struct IoCounters {
  std::uint64_t read_bytes, write_bytes, read_requests, write_requests;
  std::uint64_t short_transfers, retries, failures, flushes;
  double busy_seconds;  // of the busiest member, with at least one request in flight
};

// Splits batches into requests of at most `request_bytes` that fit the device, keeps up to
// `queue_depth` of them in flight per member (more when they are small), resumes short
// transfers at the next block, retries interruptions. Each member has a thread and a ring (or
// threads) of its own, so that a slow one holds up nobody else.
//
// Threading: every method may be called from any thread. Order between tickets, and within one, is
// not defined. Lifetime: the memory of a segment must stay valid until its ticket is done.
class IoEngine {
 public:
  explicit IoEngine(const IoOptions& options);
  // For tests: runs on the given backends, one per member, for
  // Lane::most_in_flight(queue_depth, request_bytes) tags each.
  IoEngine(const IoOptions& options, std::vector<std::unique_ptr<IoBackend>> backends);
  // Drains what is queued and in flight: the kernel may still write into that memory.
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Does not wait for I/O, but for room when thousands of segments are waiting. What is urgent goes
  // before all that is not.
  // Throws std::invalid_argument for a segment outside the members or the address space.
  std::shared_ptr<Ticket> submit(Direction direction, const std::vector<Segment>& segments,
                                 Priority priority = Priority::kNormal);

  // Makes every completed write durable on all members (fdatasync). Throws the failure of a sync,
  // or of a write whose ticket nobody has waited for.
  void flush();

  IoCounters counters() const noexcept;
  std::size_t members() const noexcept { return lanes_.size(); }
  const Lane& member(std::size_t index) const { return *lanes_.at(index); }
  const std::string& backend() const noexcept { return backend_name_; }
  const std::string& backend_reason() const noexcept { return backend_reason_; }
  // Of all members, or not at all; with the reason of the first that does not.
  bool uses_registered_buffers() const noexcept;
  bool uses_registered_files() const noexcept;
  std::string registration_reason() const;

  // Drains, stops the threads and closes the descriptors; with `cancel`, what has not begun fails
  // with ECANCELED instead. Throws as `flush` does for failed, but not for cancelled writes.
  void close(bool cancel = false);

 private:
  void stop(bool cancel) noexcept;
  void throw_unobserved_failure();

  std::shared_ptr<FailureLog> log_ = std::make_shared<FailureLog>();
  std::string backend_name_;
  std::string backend_reason_;
  std::vector<int> fds_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<std::uint64_t> flushes_{0};

  std::mutex mutex_;
  std::condition_variable submitted_;
  int submitting_ = 0;
  bool stopping_ = false;

  std::mutex close_mutex_;
  bool closed_ = false;
};

}  // namespace memascend
