// SPDX-License-Identifier: Apache-2.0
// pread and pwrite on a few threads: for kernels and containers that forbid io_uring.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "memascend/io_backend.hpp"

namespace memascend {
namespace {

// A queue of fixed room, so that starting a request allocates nothing and cannot fail.
template <typename Item>
class Ring {
 public:
  explicit Ring(std::size_t room) : items_(room) {}
  bool empty() const noexcept { return size_ == 0; }
  void push(const Item& item) noexcept { items_[(first_ + size_++) % items_.size()] = item; }
  Item pop() noexcept {
    const Item item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<Item> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

class ThreadBackend final : public IoBackend {
 public:
  explicit ThreadBackend(const BackendOptions& options)
      : fd_(options.fd),
        urgent_(options.queue_depth),
        normal_(options.queue_depth),
        ended_(options.queue_depth) {
    for (std::uint32_t i = 0; i < options.threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~ThreadBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    posted_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  const char* name() const noexcept override { return "threads"; }

  void start(const Request& request, std::uint32_t tag) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      (request.priority == Priority::kUrgent ? urgent_ : normal_).push({request, tag});
    }
    posted_.notify_one();
  }

  std::size_t wait(Completion* out, std::size_t room) noexcept override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ended_.empty() || woken_; });
    woken_ = false;
    std::size_t count = 0;
    while (count < room && !ended_.empty()) out[count++] = ended_.pop();
    return count;
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
  }

  int sync() noexcept override {
    while (::fdatasync(fd_) != 0)
      if (errno != EINTR) return errno;
    return 0;
  }

 private:
  struct Work {
    Request request;
    std::uint32_t tag;
  };

  void work() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [&] { return stopping_ || !urgent_.empty() || !normal_.empty(); });
      if (urgent_.empty() && normal_.empty()) return;
      const Work work = (urgent_.empty() ? normal_ : urgent_).pop();
      lock.unlock();
      const std::int64_t result = perform(work.request);
      lock.lock();
      ended_.push({work.tag, result});
      changed_.notify_one();
    }
  }

  std::int64_t perform(const Request& request) const noexcept {
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t moved = request.direction == Direction::kRead
                              ? ::pread(fd_, request.address, request.nbytes, offset)
                              : ::pwrite(fd_, request.address, request.nbytes, offset);
    return moved >= 0 ? moved : -errno;
  }

  const int fd_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable changed_;
  Ring<Work> urgent_;
  Ring<Work> normal_;
  Ring<Completion> ended_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<IoBackend> thread_backend(const BackendOptions& options) {
  return std::make_unique<ThreadBackend>(options);
}

}  // namespace memascend
