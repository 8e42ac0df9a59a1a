// SPDX-License-Identifier: Apache-2.0
// Requests on one io_uring. Memory inside a registered region goes by the fixed operations, which
// spare the kernel looking up and pinning the pages of every request.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <deque>

#include "memascend/error.hpp"
#include "memascend/io_backend.hpp"
#include "uring_ring.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

// A full kernel (EAGAIN, EBUSY) is given this long before it is asked again.
constexpr long kPauseNs = 1'000'000;
// After this many refusals in a row, the queued requests fail.
constexpr int kMaxRefusals = 1000;

class UringBackend final : public IoBackend {
 public:
  UringBackend(const BackendOptions& options, std::unique_ptr<uring::Ring> ring, int event_fd)
      : fd_(options.fd), ring_(std::move(ring)), event_fd_(event_fd) {
    register_regions(options.regions, static_cast<const UringBackend*>(options.registered));
    register_file();
    ended_.reserve(options.queue_depth);
    listen();
  }

  // Closing the ring cancels the outstanding read of the event; its target must still be there.
  ~UringBackend() override {
    ring_.reset();
    ::close(event_fd_);
  }

  void shut_down() noexcept override { ring_.reset(); }

  const char* name() const noexcept override { return "io_uring"; }

  void start(const Request& request, std::uint32_t tag) noexcept override {
    const int region = region_of(request);
    const bool reading = request.direction == Direction::kRead;
    uring::Sqe sqe{};
    if (region >= 0) {
      sqe.opcode = reading ? uring::kOpReadFixed : uring::kOpWriteFixed;
      sqe.buf_index = static_cast<std::uint16_t>(region);
    } else {
      sqe.opcode = reading ? uring::kOpRead : uring::kOpWrite;
    }
    sqe.fd = file_registered_ ? 0 : fd_;
    sqe.flags = file_registered_ ? uring::kSqeFixedFile : std::uint8_t{0};
    sqe.off = request.offset;
    sqe.addr = reinterpret_cast<std::uintptr_t>(request.address);
    sqe.len = static_cast<std::uint32_t>(request.nbytes);
    sqe.user_data = tag;
    ring_->push(sqe);
  }

  std::size_t wait(Completion* out, std::size_t room) noexcept override {
    enter_or_fail();
    std::size_t count = 0;
    while (count < room && !ended_.empty()) {
      out[count++] = ended_.back();
      ended_.pop_back();
    }
    uring::Cqe cqe;
    while (count < room && ring_->pop(&cqe)) {
      if (cqe.user_data == kWakeTag) {
        listen();
        continue;
      }
      out[count++] = {static_cast<std::uint32_t>(cqe.user_data), cqe.res};
    }
    return count;
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    while (::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  int sync() noexcept override {
    while (::fdatasync(fd_) != 0)
      if (errno != EINTR) return errno;
    return 0;
  }

  bool uses_registered_buffers() const noexcept override { return !regions_.empty(); }
  bool uses_registered_file() const noexcept override { return file_registered_; }
  std::string registration_reason() const override { return registration_reason_; }

 private:
  void register_regions(const std::vector<Region>& regions, const UringBackend* registered) {
    if (regions.empty()) {
      registration_reason_ = "no memory was given to register";
      return;
    }
    const bool cloned = registered != nullptr && registered->uses_registered_buffers() &&
                        ring_->clone_buffers(*registered->ring_) == 0;
    if (const int error = cloned ? 0 : ring_->register_buffers(regions); error != 0) {
      registration_reason_ = "the kernel refused to register the memory: " + errno_text(error);
      return;
    }
    regions_ = regions;
  }

  // Spares every request looking up and holding the descriptor.
  void register_file() {
    const int error = ring_->register_file(fd_);
    file_registered_ = error == 0;
    if (file_registered_) return;
    if (!registration_reason_.empty()) registration_reason_ += "; ";
    registration_reason_ += "the kernel refused to register the file: " + errno_text(error);
  }

  // The registered region that holds the whole request, or -1.
  int region_of(const Request& request) const noexcept {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      const auto& [begin, nbytes] = regions_[i];
      if (request.address >= begin && request.address + request.nbytes <= begin + nbytes)
        return static_cast<int>(i);
    }
    return -1;
  }

  // Reads the event counter through the ring, so that `wake` ends a sleep in `enter`.
  void listen() noexcept {
    uring::Sqe sqe{};
    sqe.opcode = uring::kOpRead;
    sqe.fd = event_fd_;
    sqe.addr = reinterpret_cast<std::uintptr_t>(&event_count_);
    sqe.len = sizeof event_count_;
    sqe.user_data = kWakeTag;
    ring_->push(sqe);
  }

  // A kernel that refuses for lack of resources is asked again, as long as completions may free
  // some. Requests that it will not take at all fail with its errno.
  void enter_or_fail() noexcept {
    const int error = ring_->enter();
    if (error == 0 || error == EINTR) {
      refusals_ = 0;
      return;
    }
    const timespec pause{0, kPauseNs};
    ::nanosleep(&pause, nullptr);
    if ((error == EAGAIN || error == EBUSY) && ++refusals_ < kMaxRefusals) return;
    refusals_ = 0;
    bool listening_lost = false;
    for (uring::Sqe sqe; ring_->withdraw(&sqe);) {
      if (sqe.user_data == kWakeTag) {
        listening_lost = true;
        continue;
      }
      ended_.push_back({static_cast<std::uint32_t>(sqe.user_data), -error});
    }
    if (listening_lost) listen();
  }

  const int fd_;
  bool file_registered_ = false;
  std::unique_ptr<uring::Ring> ring_;
  const int event_fd_;
  std::uint64_t event_count_ = 0;
  std::vector<Region> regions_;
  std::string registration_reason_;
  std::vector<Completion> ended_;
  int refusals_ = 0;
};

}  // namespace

std::unique_ptr<IoBackend> try_uring_backend(const BackendOptions& options, std::string* reason,
                                             int* error_number) {
  auto ring = uring::Ring::open(options.queue_depth + 1, reason, error_number);
  if (ring == nullptr) return nullptr;
  const int event_fd = ::eventfd(0, EFD_CLOEXEC);
  if (event_fd < 0) {
    *error_number = errno;
    *reason = "cannot create an event descriptor: " + errno_text(*error_number);
    return nullptr;
  }
  return std::make_unique<UringBackend>(options, std::move(ring), event_fd);
}

}  // namespace memascend
