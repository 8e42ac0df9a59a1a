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

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxDepth = 1024;

// A request that keeps ending without progress is given up after this many tries. A file that ends
// inside the request looks the same as a device that is slow to start: both move nothing.
constexpr std::uint32_t kMaxFruitless = 32;

// Direct I/O must go on at a block boundary. The block is taken from the request's own alignment:
// a request that is not aligned did not go to a direct descriptor, and may go on anywhere.
std::uint64_t resume_block(const Request& request) noexcept {
  const std::uint64_t all =
      request.offset | reinterpret_cast<std::uintptr_t>(request.address) | request.nbytes;
  for (const std::uint64_t block : {std::uint64_t{4096}, std::uint64_t{512}})
    if (all % block == 0) return block;
  return 1;
}

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

// The engine's thread: feed the backend, sleep until something ends, account for it.
void IoEngine::run() noexcept {
  std::vector<Completion> ended(flights_.size());
  Clock::time_point busy_since;
  bool busy = false;
  while (feed()) {
    const bool any = free_tags_.size() < flights_.size();
    const auto now = Clock::now();
    if (busy)
      busy_ns_.fetch_add(static_cast<std::uint64_t>((now - busy_since).count()),
                         std::memory_order_relaxed);
    busy = any;
    busy_since = now;
    const std::size_t count = backend_->wait(ended.data(), ended.size());
    for (std::size_t i = 0; i < count; ++i) complete(ended[i]);
  }
}

// Starts as many requests as depth allows, members in turn. False when the engine may end.
bool IoEngine::feed() noexcept {
  {
    const std::lock_guard lock(mutex_);
    const auto members = static_cast<std::uint32_t>(members_.size());
    for (std::uint32_t refused = 0; refused < members && !free_tags_.empty();) {
      refused = next_request(next_member_) ? 0 : refused + 1;
      next_member_ = (next_member_ + 1) % members;
    }
    const bool idle = to_start_.empty() && free_tags_.size() == flights_.size();
    if (stopping_ && queued_ == 0 && submitting_ == 0 && idle) return false;
    // With every tag in flight a wake-up would bring nothing: the next completion feeds.
    asleep_ = !free_tags_.empty();
  }
  room_.notify_all();
  for (const std::uint32_t tag : to_start_) backend_->start(flights_[tag].request, tag);
  to_start_.clear();
  return true;
}

// Cuts one request from the front of the member's queue. Pieces of a failed batch are dropped.
bool IoEngine::next_request(std::uint32_t index) noexcept {
  Member& member = members_[index];
  while (!member.queue.empty() && member.queue.front().ticket->failed()) {
    const Transfer transfer = std::move(member.queue.front());
    member.queue.pop_front();
    --queued_;
    transfer.ticket->progress(transfer.nbytes);
  }
  if (member.queue.empty() || member.in_flight >= depth_per_member_) return false;
  Transfer& transfer = member.queue.front();
  const std::uint64_t nbytes = std::min(transfer.nbytes, request_bytes_);
  const std::uint32_t tag = free_tags_.back();
  free_tags_.pop_back();
  Flight& flight = flights_[tag];
  flight.ticket = transfer.ticket;
  flight.request = {transfer.direction, index, transfer.offset, transfer.address, nbytes};
  flight.begin = transfer.offset;
  flight.block = resume_block(flight.request);
  flight.retries = 0;
  to_start_.push_back(tag);
  ++member.in_flight;
  transfer.offset += nbytes;
  transfer.address += nbytes;
  transfer.nbytes -= nbytes;
  if (transfer.nbytes == 0) {
    member.queue.pop_front();
    --queued_;
  }
  return true;
}

// A short transfer of 8,192 bytes that ends after 4,608 with blocks of 4,096 goes on at 4,096: the
// last 512 bytes move twice, and the address stays aligned. Only whole blocks count as progress,
// but for a request that asked for no alignment.
void IoEngine::complete(const Completion& completion) noexcept {
  Flight& flight = flights_[completion.tag];
  Request& request = flight.request;
  count(completion, request.direction);
  const std::int64_t result = completion.result;
  if (result >= 0 && static_cast<std::uint64_t>(result) >= request.nbytes) {
    flight.ticket->progress(request.nbytes);
    return retire(completion.tag);
  }
  const bool interrupted = result == -EINTR || result == -EAGAIN;
  if (result < 0 && !interrupted) {
    fail(flight, 0, static_cast<int>(-result));
    return retire(completion.tag);
  }
  const std::uint64_t moved = interrupted ? 0 : static_cast<std::uint64_t>(result);
  const std::uint64_t whole = moved / flight.block * flight.block;
  if (whole > 0) {
    short_transfers_.fetch_add(1, std::memory_order_relaxed);
    flight.retries = 0;
    flight.ticket->progress(whole);
    request.offset += whole;
    request.address += whole;
    request.nbytes -= whole;
  } else if (moved == 0 && !interrupted) {
    // No byte and no error: the end of the file. Trying again cannot move it.
    fail(flight, 0, 0);
    return retire(completion.tag);
  } else if (++flight.retries >= kMaxFruitless) {
    fail(flight, moved, interrupted ? static_cast<int>(-result) : 0);
    return retire(completion.tag);
  } else {
    retries_.fetch_add(1, std::memory_order_relaxed);
  }
  backend_->start(request, completion.tag);
}

void IoEngine::fail(const Flight& flight, std::uint64_t moved, int error_number) noexcept {
  const Request& request = flight.request;
  failures_.fetch_add(1, std::memory_order_relaxed);
  const std::uint64_t done_before = request.offset - flight.begin;
  flight.ticket->fail({request.direction, request.member, flight.begin,
                       request.nbytes + done_before, moved + done_before, error_number,
                       members_[request.member].path});
  flight.ticket->progress(request.nbytes);
}

void IoEngine::retire(std::uint32_t tag) noexcept {
  Flight& flight = flights_[tag];
  --members_[flight.request.member].in_flight;
  flight.ticket.reset();
  free_tags_.push_back(tag);
}

void IoEngine::count(const Completion& completion, Direction direction) noexcept {
  const bool reading = direction == Direction::kRead;
  (reading ? read_requests_ : write_requests_).fetch_add(1, std::memory_order_relaxed);
  if (completion.result > 0)
    (reading ? read_bytes_ : write_bytes_)
        .fetch_add(static_cast<std::uint64_t>(completion.result), std::memory_order_relaxed);
}

}  // namespace memascend
