// SPDX-License-Identifier: Apache-2.0
// The engine's thread: it alone cuts, starts, resumes and retires requests, so that none of that
// needs a lock. Nothing here throws; errno goes into the ticket and is thrown where it is waited
// for.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "memascend/io_engine.hpp"

namespace memascend {
namespace {

using Clock = std::chrono::steady_clock;

// A request that keeps ending without progress is given up after this many tries. A file that ends
// inside a block looks the same as transfers cut short there: less than a block moves each time.
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

}  // namespace

// Feed the backend, sleep until something ends, account for it.
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
