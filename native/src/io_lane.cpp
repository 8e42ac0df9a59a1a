// SPDX-License-Identifier: Apache-2.0
// What other threads ask of a lane; what its own thread does is in io_loop.cpp.
#include "memascend/io_lane.hpp"

#include <algorithm>
#include <utility>

namespace memascend {

Lane::Lane(const LaneOptions& options, std::unique_ptr<IoBackend> backend)
    : member_(options.member),
      path_(options.path),
      queue_depth_(options.queue_depth),
      small_per_large_(small_per_large(options.request_bytes)),
      limits_(device_limits(options.fd)),
      request_bytes_(fitted_request_bytes(options.request_bytes, limits_)),
      backend_(std::move(backend)) {
  const std::uint32_t tags = most_in_flight(queue_depth_, options.request_bytes);
  flights_.resize(tags);
  to_start_.reserve(tags);
  for (std::uint32_t tag = tags; tag-- > 0;) free_tags_.push_back(tag);
  thread_ = std::thread([this] { run(); });
}

Lane::~Lane() {
  begin_stop();
  finish_stop();
}

void Lane::push(const std::shared_ptr<Ticket>& ticket, Direction direction, Priority priority,
                const std::vector<Segment>& segments) {
  bool wake = false;
  {
    std::unique_lock lock(mutex_);
    Queue& queue = queue_of(priority);
    auto& transfers = queue.transfers;
    for (const Segment& segment : segments) {
      if (segment.nbytes == 0 || segment.member != member_) continue;
      // Neighbours in the file and in memory become one, so that the split is at the size of a
      // request and not at every tile.
      if (!transfers.empty()) {
        Transfer& last = transfers.back();
        if (last.ticket == ticket && last.direction == direction &&
            last.offset + last.nbytes == segment.offset &&
            last.address + last.nbytes == segment.address) {
          last.nbytes += segment.nbytes;
          continue;
        }
      }
      if (transfers.size() >= kMaxQueued) {
        if (std::exchange(queue.wakes, false)) backend_->wake();
        room_.wait(lock, [&] { return transfers.size() < kMaxQueued; });
      }
      transfers.push_back({ticket, direction, segment.offset, segment.address, segment.nbytes});
    }
    wake = !transfers.empty() && std::exchange(queue.wakes, false);
  }
  if (wake) backend_->wake();
}

void Lane::cancel() noexcept {
  {
    const std::lock_guard lock(mutex_);
    cancelling_ = true;
  }
  backend_->wake();
}

void Lane::begin_stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  backend_->wake();
}

void Lane::finish_stop() noexcept {
  if (!thread_.joinable()) return;
  thread_.join();
  backend_->shut_down();
}

}  // namespace memascend
