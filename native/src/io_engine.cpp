// SPDX-License-Identifier: Apache-2.0
#include "memascend/io_engine.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
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

std::unique_ptr<IoBackend> choose_backend(const std::string& name, const BackendOptions& options,
                                          std::string* reason) {
  if (name == "threads") return thread_backend(options);
  if (name != "auto" && name != "io_uring")
    throw std::invalid_argument("unknown I/O backend '" + name +
                                "'; known are auto, io_uring, threads");
  int error_number = 0;
  auto ring = try_uring_backend(options, reason, &error_number);
  if (ring != nullptr) return ring;
  if (name == "io_uring") throw SystemError(error_number, "cannot use io_uring: " + *reason);
  return thread_backend(options);
}

}  // namespace

IoEngine::IoEngine(const IoOptions& options) : IoEngine(options, nullptr) {}

IoEngine::IoEngine(const IoOptions& options, std::unique_ptr<IoBackend> backend)
    : request_bytes_(options.request_bytes), depth_per_member_(options.queue_depth) {
  check_options(options);
  BackendOptions for_backend;
  for_backend.fds = duplicated(options.fds);
  for_backend.queue_depth =
      std::min(kMaxDepth, options.queue_depth * static_cast<std::uint32_t>(options.fds.size()));
  for_backend.threads = options.threads;
  for_backend.regions = options.regions;
  for (const int fd : for_backend.fds) {
    members_.emplace_back();
    members_.back().fd = fd;
    members_.back().path = path_of_descriptor(fd);
  }
  try {
    backend_ = backend != nullptr ? std::move(backend)
                                  : choose_backend(options.backend, for_backend, &backend_reason_);
    backend_name_ = backend_->name();
    flights_.resize(for_backend.queue_depth);
    to_start_.reserve(for_backend.queue_depth);
    for (std::uint32_t tag = for_backend.queue_depth; tag-- > 0;) free_tags_.push_back(tag);
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    for (const int fd : for_backend.fds) ::close(fd);
    throw;
  }
}

IoEngine::~IoEngine() {
  stop();
}

std::shared_ptr<Ticket> IoEngine::submit(Direction direction,
                                         const std::vector<Segment>& segments) {
  std::uint64_t total = 0;
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  for (const Segment& segment : segments) {
    if (segment.member >= members_.size())
      throw std::invalid_argument("segment names member " + std::to_string(segment.member) +
                                  " of " + std::to_string(members_.size()));
    if (segment.offset > kLimit || segment.nbytes > kLimit - segment.offset ||
        segment.nbytes > kLimit - total)
      throw std::invalid_argument("segment at offset " + grouped(segment.offset) + " of " +
                                  grouped(segment.nbytes) + " bytes leaves the address space");
    if (segment.address == nullptr && segment.nbytes > 0)
      throw std::invalid_argument("segment has no memory (address 0)");
    total += segment.nbytes;
  }
  auto ticket = std::make_shared<Ticket>(total, log_);
  bool wake = false;
  {
    std::unique_lock lock(mutex_);
    if (stopping_) throw std::logic_error("the I/O engine is closed");
    // A batch that has begun is queued to its end, also when `close` comes in between: the engine
    // does not stop before.
    ++submitting_;
    for (const Segment& segment : segments) {
      if (segment.nbytes == 0) continue;
      auto& queue = members_[segment.member].queue;
      // Neighbours in the file and in memory become one, so that the split is at request_bytes and
      // not at every tile.
      if (!queue.empty()) {
        Transfer& last = queue.back();
        if (last.ticket == ticket && last.offset + last.nbytes == segment.offset &&
            last.address + last.nbytes == segment.address) {
          last.nbytes += segment.nbytes;
          continue;
        }
      }
      if (queued_ >= kMaxQueued) {
        if (std::exchange(asleep_, false)) backend_->wake();
        room_.wait(lock, [&] { return queued_ < kMaxQueued; });
      }
      queue.push_back({ticket, direction, segment.offset, segment.address, segment.nbytes});
      ++queued_;
    }
    --submitting_;
    wake = std::exchange(asleep_, false) || stopping_;
  }
  if (wake) backend_->wake();
  return ticket;
}

void IoEngine::flush() {
  // Keeps the descriptors open: a sync on a closed number could reach another file.
  const std::lock_guard closing(close_mutex_);
  if (!thread_.joinable()) throw std::logic_error("the I/O engine is closed");
  throw_unobserved_failure();
  std::vector<int> errors(members_.size(), 0);
  const auto sync_one = [&](std::uint32_t member) noexcept {
    errors[member] = backend_->sync(member);
  };
  // One thread per further member: their caches empty at the same time.
  std::vector<std::thread> others;
  for (std::uint32_t member = 1; member < members_.size(); ++member)
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
                        members_[member].path);
}

IoCounters IoEngine::counters() const noexcept {
  const auto value = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {
      value(read_bytes_),     value(write_bytes_),     value(read_requests_),
      value(write_requests_), value(short_transfers_), value(retries_),
      value(failures_),       value(flushes_),         static_cast<double>(value(busy_ns_)) * 1e-9};
}

bool IoEngine::uses_registered_buffers() const noexcept {
  return backend_->uses_registered_buffers();
}

std::string IoEngine::registration_reason() const {
  return backend_->registration_reason();
}

void IoEngine::close() {
  stop();
  throw_unobserved_failure();
}

void IoEngine::stop() noexcept {
  const std::lock_guard closing(close_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    asleep_ = false;
  }
  backend_->wake();
  thread_.join();
  for (const Member& member : members_) ::close(member.fd);
}

void IoEngine::throw_unobserved_failure() {
  if (const auto failure = log_->take()) throw failure->error();
}

}  // namespace memascend
