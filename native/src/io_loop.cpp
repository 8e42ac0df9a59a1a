// SPDX-License-Identifier: Apache-2.0
// A lane's thread: it alone cuts, starts, resumes and retires requests, so that none of that
// needs a lock. Nothing here throws; errno goes into the ticket and is thrown where it is waited
// for.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "memascend/io_lane.hpp"

namespace memascend {
namespace {

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
void Lane::run() noexcept {
  std::vector<Completion> ended(flights_.size());
  while (feed()) {
    const std::size_t count = backend_->wait(ended.data(), ended.size());
    pass_time(in_flight_);
    for (std::size_t i = 0; i < count; ++i) complete(ended[i]);
  }
}

// Starts as many requests as depth allows. False when the thread may end.
bool Lane::feed() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (cancelling_) drop_queued();
    while (next_request(Priority::kUrgent) || next_request(Priority::kNormal)) {
    }
    const bool empty = queues_[0].transfers.empty() && queues_[1].transfers.empty();
    if (stopping_ && empty && in_flight_ == 0) return false;
    // Without room a wake-up would bring nothing: the next completion feeds. While cancelling there
    // is room for all, since nothing is begun.
    for (const Priority priority : {Priority::kUrgent, Priority::kNormal})
      queue_of(priority).wakes = cancelling_ || has_room(priority);
  }
  room_.notify_all();
  if (to_start_.empty()) return true;
  pass_time(in_flight_ - static_cast<std::uint32_t>(to_start_.size()));
  for (const std::uint32_t tag : to_start_) {
    flights_[tag].started = now_;
    flights_[tag].ticket->begin(member_, now_);
    backend_->start(flights_[tag].request, tag);
  }
  to_start_.clear();
  return true;
}

bool Lane::has_room(Priority priority) const noexcept {
  const bool urgent = priority == Priority::kUrgent;
  const std::uint64_t depth = queue_depth_ + (urgent ? urgent_reserve(queue_depth_) : 0);
  return in_flight_ < small_per_large_ * depth && bytes_in_flight_ < depth * request_bytes_;
}

// Cuts one request from the front of the queue. Pieces of a failed batch are dropped.
bool Lane::next_request(Priority priority) noexcept {
  auto& queue = queue_of(priority).transfers;
  while (!queue.empty() && queue.front().ticket->failed()) {
    const Transfer transfer = std::move(queue.front());
    queue.pop_front();
    transfer.ticket->progress(transfer.nbytes);
  }
  if (queue.empty() || !has_room(priority)) return false;
  Transfer& transfer = queue.front();
  const std::uint64_t nbytes = std::min(transfer.nbytes, request_bytes_);
  const std::uint32_t tag = free_tags_.back();
  free_tags_.pop_back();
  Flight& flight = flights_[tag];
  flight.ticket = transfer.ticket;
  flight.request = {transfer.direction, priority, transfer.offset, transfer.address, nbytes};
  flight.begin = transfer.offset;
  flight.nbytes = nbytes;
  flight.block = resume_block(flight.request);
  flight.retries = 0;
  to_start_.push_back(tag);
  ++in_flight_;
  bytes_in_flight_ += nbytes;
  transfer.offset += nbytes;
  transfer.address += nbytes;
  transfer.nbytes -= nbytes;
  if (transfer.nbytes == 0) queue.pop_front();
  return true;
}

// The caller asked for it and so needs no reminder at `close`: only the tickets tell.
void Lane::drop_queued() noexcept {
  for (Queue& queue : queues_)
    while (!queue.transfers.empty()) {
      const Transfer transfer = std::move(queue.transfers.front());
      queue.transfers.pop_front();
      statistics_.cancelled(transfer.nbytes);
      transfer.ticket->cancel(
          {transfer.direction, member_, transfer.offset, transfer.nbytes, 0, ECANCELED, path_});
      transfer.ticket->progress(transfer.nbytes);
    }
}

// A short transfer of 8,192 bytes that ends after 4,608 with blocks of 4,096 goes on at 4,096: the
// last 512 bytes move twice, and the address stays aligned. Only whole blocks count as progress,
// but for a request that asked for no alignment.
void Lane::complete(const Completion& completion) noexcept {
  Flight& flight = flights_[completion.tag];
  Request& request = flight.request;
  statistics_.ended(request, completion.result, now_ - flight.started);
  const std::int64_t result = completion.result;
  if (result >= 0 && static_cast<std::uint64_t>(result) >= request.nbytes) {
    flight.ticket->moved(member_, request.nbytes, now_);
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
    statistics_.short_transfer();
    flight.retries = 0;
    flight.ticket->moved(member_, whole, now_);
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
    statistics_.retry();
  }
  flight.started = now_;
  backend_->start(request, completion.tag);
}

void Lane::fail(const Flight& flight, std::uint64_t moved, int error_number) noexcept {
  const Request& request = flight.request;
  statistics_.failure();
  const std::uint64_t done_before = request.offset - flight.begin;
  flight.ticket->fail({request.direction, member_, flight.begin, request.nbytes + done_before,
                       moved + done_before, error_number, path_});
  flight.ticket->progress(request.nbytes);
}

void Lane::retire(std::uint32_t tag) noexcept {
  --in_flight_;
  bytes_in_flight_ -= flights_[tag].nbytes;
  flights_[tag].ticket.reset();
  free_tags_.push_back(tag);
}

// Books the time since the last call, during which `in_flight` requests were in flight.
void Lane::pass_time(std::uint32_t in_flight) noexcept {
  const Clock::time_point before = now_;
  now_ = Clock::now();
  statistics_.passed(now_ - before, in_flight);
}

}  // namespace memascend
