// SPDX-License-Identifier: Apache-2.0
#include "memascend/io_ticket.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace memascend {

SystemError IoFailure::error() const {
  const bool reading = direction == Direction::kRead;
  std::string text = std::string("cannot ") + (reading ? "read " : "write ") + grouped(nbytes) +
                     " bytes at offset " + grouped(offset) + " of member " +
                     std::to_string(member) + ": ";
  if (error_number == 0) {
    text += reading ? "the file ends after " : "the device took only ";
    text += grouped(moved) + " of them; the file is shorter than its store says";
    return SystemError(EIO, std::move(text), path);
  }
  text += errno_text(error_number);
  if (moved > 0) text += " after " + grouped(moved) + " bytes";
  if (const std::string remedy = io_remedy(error_number); !remedy.empty()) text += "; " + remedy;
  return SystemError(error_number, std::move(text), path);
}

void FailureLog::add(const Ticket* ticket, IoFailure failure) noexcept {
  const std::lock_guard lock(mutex_);
  failures_.emplace_back(ticket, std::move(failure));
}

void FailureLog::observed(const Ticket* ticket) noexcept {
  const std::lock_guard lock(mutex_);
  failures_.erase(std::remove_if(failures_.begin(), failures_.end(),
                                 [&](const auto& entry) { return entry.first == ticket; }),
                  failures_.end());
}

std::optional<IoFailure> FailureLog::take() noexcept {
  const std::lock_guard lock(mutex_);
  if (failures_.empty()) return std::nullopt;
  IoFailure first = std::move(failures_.front().second);
  failures_.clear();
  return first;
}

Ticket::Ticket(std::uint64_t nbytes, std::shared_ptr<FailureLog> log, Direction direction,
               std::size_t members)
    : nbytes_(nbytes),
      log_(std::move(log)),
      direction_(direction),
      spans_(members),
      pending_(nbytes),
      done_(nbytes == 0) {}

bool Ticket::wait_for(std::chrono::nanoseconds timeout) const {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, timeout, [&] { return done(); });
}

void Ticket::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return done(); });
  if (!failure_) return;
  log_->observed(this);
  throw failure_->error();
}

void Ticket::begin(std::uint32_t member, MemberSpan::Time now) noexcept {
  if (member < spans_.size() && spans_[member].begun == MemberSpan::Time{})
    spans_[member].begun = now;
}

// The release in `progress` that follows makes it visible to whoever sees the batch done.
void Ticket::moved(std::uint32_t member, std::uint64_t nbytes, MemberSpan::Time now) noexcept {
  if (member >= spans_.size()) return;
  spans_[member].nbytes += nbytes;
  spans_[member].ended = now;
}

void Ticket::progress(std::uint64_t nbytes) noexcept {
  if (pending_.fetch_sub(nbytes, std::memory_order_acq_rel) == nbytes) finish();
}

void Ticket::fail(const IoFailure& failure) noexcept {
  if (note(failure) && failure.direction == Direction::kWrite) log_->add(this, failure);
}

void Ticket::cancel(const IoFailure& failure) noexcept {
  note(failure);
}

// The first failure of any member counts; what follows it is often its consequence.
bool Ticket::note(const IoFailure& failure) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = failure;
  failed_.store(true, std::memory_order_relaxed);
  return true;
}

void Ticket::finish() noexcept {
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
}

}  // namespace memascend
