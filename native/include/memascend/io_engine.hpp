// SPDX-License-Identifier: Apache-2.0
// Batched asynchronous reads and writes over the members of a store.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memascend/io_backend.hpp"
#include "memascend/io_ticket.hpp"

namespace memascend {

// A contiguous piece of a member and the memory it is read into or written from.
struct Segment {
  std::uint32_t member;
  std::uint64_t offset;
  std::byte* address;
  std::uint64_t nbytes;
};

struct IoOptions {
  std::vector<int> fds;            // not owned; duplicated
  std::string backend = "auto";    // "auto", "io_uring", "threads"
  std::uint32_t queue_depth = 32;  // requests in flight per member
  std::uint64_t request_bytes = 1U << 20;
  std::uint32_t threads = 4;  // of the thread backend
  std::vector<Region> regions;
};

struct IoCounters {
  std::uint64_t read_bytes, write_bytes, read_requests, write_requests;
  std::uint64_t short_transfers, retries, failures, flushes;
  double busy_seconds;  // with at least one request in flight
};

// Splits batches into requests of at most `request_bytes`, keeps up to `queue_depth` of them in
// flight per member, resumes short transfers at the next block, retries interruptions.
//
// Threading: every method may be called from any thread. Order between tickets, and within one, is
// not defined. Lifetime: the memory of a segment must stay valid until its ticket is done.
class IoEngine {
 public:
  explicit IoEngine(const IoOptions& options);
  // For tests: runs on the given backend, which must use `options.fds` or its own disks.
  IoEngine(const IoOptions& options, std::unique_ptr<IoBackend> backend);
  // Drains what is in flight: the kernel may still write into that memory.
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Does not wait for I/O, but for room when more than kMaxQueued segments are waiting.
  // Throws std::invalid_argument for a segment outside the members or the address space.
  std::shared_ptr<Ticket> submit(Direction direction, const std::vector<Segment>& segments);

  // Makes every completed write durable on all members (fdatasync). Throws the failure of a sync,
  // or of a write whose ticket nobody has waited for.
  void flush();

  IoCounters counters() const noexcept;
  const std::string& backend() const noexcept { return backend_name_; }
  const std::string& backend_reason() const noexcept { return backend_reason_; }
  bool uses_registered_buffers() const noexcept;
  std::string registration_reason() const;

  // Drains, stops the thread and closes the descriptors. Throws as `flush` does for failed writes.
  void close();

  static constexpr std::size_t kMaxQueued = 8192;

 private:
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
    std::uint64_t begin;  // offset at which the request first began
    std::uint64_t block;  // transfers resume at multiples of this
    std::uint32_t retries;
  };
  struct Member {
    int fd;
    std::string path;
    std::deque<Transfer> queue;
    std::uint32_t in_flight = 0;
  };

  void run() noexcept;
  bool feed() noexcept;
  bool next_request(std::uint32_t member) noexcept;
  void complete(const Completion& completion) noexcept;
  void retire(std::uint32_t tag) noexcept;
  void fail(const Flight& flight, std::uint64_t moved, int error_number) noexcept;
  void stop() noexcept;
  void throw_unobserved_failure();
  void count(const Completion& completion, Direction direction) noexcept;

  const std::uint64_t request_bytes_;
  const std::uint32_t depth_per_member_;
  std::shared_ptr<FailureLog> log_ = std::make_shared<FailureLog>();
  std::string backend_name_;
  std::string backend_reason_;
  std::unique_ptr<IoBackend> backend_;

  mutable std::mutex mutex_;
  std::condition_variable room_;
  std::vector<Member> members_;
  std::size_t queued_ = 0;
  int submitting_ = 0;
  bool asleep_ = false;
  bool stopping_ = false;

  // The engine's thread alone uses these.
  std::vector<Flight> flights_;
  std::vector<std::uint32_t> free_tags_;
  std::vector<std::uint32_t> to_start_;
  std::uint32_t next_member_ = 0;

  std::atomic<std::uint64_t> read_bytes_{0}, write_bytes_{0}, read_requests_{0}, write_requests_{0},
      short_transfers_{0}, retries_{0}, failures_{0}, flushes_{0}, busy_ns_{0};

  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace memascend
