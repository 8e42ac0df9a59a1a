// SPDX-License-Identifier: Apache-2.0
#include "memascend/io_engine.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

namespace memascend {
namespace {

constexpr std::uint32_t kMaxDepth = 1024;

void check_options(const IoOptions& options) {
  if (options.fds.empty()) throw std::invalid_argument("an I/O engine needs at least one member");
  if (options.queue_depth < 1 || options.queue_depth > kMaxDepth)
    throw std::invalid_argument("queue_depth must be 1 to " + std::to_string(kMaxDepth) + ", got " +
                                std::to_string(options.queue_depth));
  if (options.request_bytes < 4096 || options.request_bytes % 4096 != 0 ||
      options.request_bytes > (std::uint64_t{1} << 30))
    throw std::invalid_argument("request_bytes must be a multiple of 4,096 up to 1 GiB, got " +
                                grouped(options.request_bytes));
  if (options.threads < 1 || options.threads > 256)
    throw std::invalid_argument("threads must be 1 to 256, got " + std::to_string(options.threads));
}

// Our own descriptors: a caller that closes its own early cannot turn our writes onto a file that
// happens to get the same number.
std::vector<int> duplicated(const std::vector<int>& fds) {
  std::vector<int> own;
  for (const int fd : fds) {
    const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
      const int error = errno;
      for (const int opened : own) ::close(opened);
      throw SystemError(
          error, "cannot duplicate descriptor " + std::to_string(fd) + ": " + errno_text(error));
    }
    own.push_back(copy);
  }
  return own;
}

std::vector<BackendOptions> per_member(const IoOptions& options, const std::vector<int>& fds) {
  std::vector<BackendOptions> all;
  for (const int fd : fds) {
    BackendOptions one;
    one.fd = fd;
    one.queue_depth = Lane::most_in_flight(options.queue_depth, options.request_bytes);
    one.threads = options.threads;
    one.regions = options.regions;
    all.push_back(one);
  }
  return all;
}

using Backends = std::vector<std::unique_ptr<IoBackend>>;

// A ring for each member, or none at all with the reason.
Backends uring_backends(std::vector<BackendOptions> members, std::string* reason,
                        int* error_number) {
  Backends rings;
  for (BackendOptions& member : members) {
    if (!rings.empty()) member.registered = rings.front().get();
    auto ring = try_uring_backend(member, reason, error_number);
    if (ring == nullptr) return {};
    rings.push_back(std::move(ring));
  }
  return rings;
}

Backends choose_backends(const std::string& name, const std::vector<BackendOptions>& members,
                         std::string* reason) {
  if (name != "auto" && name != "io_uring" && name != "threads")
    throw std::invalid_argument("unknown I/O backend '" + name +
                                "'; known are auto, io_uring, threads");
  if (name != "threads") {
    int error_number = 0;
    Backends rings = uring_backends(members, reason, &error_number);
    if (!rings.empty()) return rings;
    if (name == "io_uring") throw SystemError(error_number, "cannot use io_uring: " + *reason);
  }
  Backends pools;
  for (const BackendOptions& member : members) pools.push_back(thread_backend(member));
  return pools;
}

std::uint64_t checked_total(const std::vector<Segment>& segments, std::size_t members) {
  std::uint64_t total = 0;
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  for (const Segment& segment : segments) {
    if (segment.member >= members)
      throw std::invalid_argument("segment names member " + std::to_string(segment.member) +
                                  " of " + std::to_string(members));
    if (segment.offset > kLimit || segment.nbytes > kLimit - segment.offset ||
        segment.nbytes > kLimit - total)
      throw std::invalid_argument("segment at offset " + grouped(segment.offset) + " of " +
                                  grouped(segment.nbytes) + " bytes leaves the address space");
    if (segment.address == nullptr && segment.nbytes > 0)
      throw std::invalid_argument("segment has no memory (address 0)");
    total += segment.nbytes;
  }
  return total;
}

}  // namespace

IoEngine::IoEngine(const IoOptions& options) : IoEngine(options, {}) {}

IoEngine::IoEngine(const IoOptions& options, std::vector<std::unique_ptr<IoBackend>> backends) {
  check_options(options);
  fds_ = duplicated(options.fds);
  try {
    if (backends.empty())
      backends = choose_backends(options.backend, per_member(options, fds_), &backend_reason_);
    backend_name_ = backends.front()->name();
    for (std::size_t index = 0; index < fds_.size(); ++index) {
      LaneOptions lane;
      lane.member = static_cast<std::uint32_t>(index);
      lane.fd = fds_[index];
      lane.path = path_of_descriptor(fds_[index]);
      lane.queue_depth = options.queue_depth;
      lane.request_bytes = options.request_bytes;
      lanes_.push_back(std::make_unique<Lane>(lane, std::move(backends.at(index))));
    }
  } catch (...) {
    lanes_.clear();
    backends.clear();
    for (const int fd : fds_) ::close(fd);
    throw;
  }
}

IoEngine::~IoEngine() {
  stop(false);
}

std::shared_ptr<Ticket> IoEngine::submit(Direction direction, const std::vector<Segment>& segments,
                                         Priority priority) {
  const std::uint64_t total = checked_total(segments, lanes_.size());
  auto ticket = std::make_shared<Ticket>(total, log_, direction, lanes_.size());
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw std::logic_error("the I/O engine is closed");
    // A batch that has begun is queued to its end, also when `close` comes in between: the lanes
    // do not stop before.
    ++submitting_;
  }
  std::vector<bool> named(lanes_.size(), false);
  for (const Segment& segment : segments) named[segment.member] = true;
  for (std::size_t member = 0; member < lanes_.size(); ++member)
    if (named[member]) lanes_[member]->push(ticket, direction, priority, segments);
  const std::lock_guard lock(mutex_);
  if (--submitting_ == 0 && stopping_) submitted_.notify_all();
  return ticket;
}

void IoEngine::flush() {
  // Keeps the descriptors open: a sync on a closed number could reach another file.
  const std::lock_guard closing(close_mutex_);
  if (closed_) throw std::logic_error("the I/O engine is closed");
  throw_unobserved_failure();
  std::vector<int> errors(lanes_.size(), 0);
  const auto sync_one = [&](std::size_t member) noexcept {
    errors[member] = lanes_[member]->sync();
  };
  // One thread per further member: their caches empty at the same time.
  std::vector<std::thread> others;
  for (std::size_t member = 1; member < lanes_.size(); ++member)
    others.emplace_back(sync_one, member);
  sync_one(0);
  for (std::thread& thread : others) thread.join();
  flushes_.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t member = 0; member < errors.size(); ++member)
    if (errors[member] != 0)
      throw SystemError(errors[member],
                        "cannot flush member " + std::to_string(member) + ": " +
                            errno_text(errors[member]) +
                            "; what was written since the last flush may be lost",
                        lanes_[member]->path());
}

IoCounters IoEngine::counters() const noexcept {
  IoCounters total{};
  for (const auto& lane : lanes_) {
    const MemberStatistics one = lane->statistics();
    total.read_bytes += one.read.bytes;
    total.write_bytes += one.write.bytes;
    total.read_requests += one.read.requests;
    total.write_requests += one.write.requests;
    total.short_transfers += one.short_transfers;
    total.retries += one.retries;
    total.failures += one.failures;
    total.busy_seconds = std::max(total.busy_seconds, one.busy_seconds);
  }
  total.flushes = flushes_.load(std::memory_order_relaxed);
  return total;
}

bool IoEngine::uses_registered_buffers() const noexcept {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->backend().uses_registered_buffers(); });
}

bool IoEngine::uses_registered_files() const noexcept {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->backend().uses_registered_file(); });
}

std::string IoEngine::registration_reason() const {
  for (const auto& lane : lanes_)
    if (std::string reason = lane->backend().registration_reason(); !reason.empty()) return reason;
  return {};
}

void IoEngine::close(bool cancel) {
  stop(cancel);
  throw_unobserved_failure();
}

void IoEngine::stop(bool cancel) noexcept {
  const std::lock_guard closing(close_mutex_);
  if (closed_) return;
  closed_ = true;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (cancel)
    for (const auto& lane : lanes_) lane->cancel();
  {
    std::unique_lock lock(mutex_);
    submitted_.wait(lock, [&] { return submitting_ == 0; });
  }
  for (const auto& lane : lanes_) lane->begin_stop();
  for (const auto& lane : lanes_) lane->finish_stop();
  for (const int fd : fds_) ::close(fd);
}

void IoEngine::throw_unobserved_failure() {
  if (const auto failure = log_->take()) throw failure->error();
}

}  // namespace memascend
