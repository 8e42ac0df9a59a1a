// SPDX-License-Identifier: Apache-2.0
#include "memascend/thread_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memascend {
namespace {

constexpr int kMaxDefaultThreads = 16;
constexpr int kMaxThreads = 256;

void check_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("the number of kernel threads must be 1 to " +
                                std::to_string(kMaxThreads) + ", got " + std::to_string(threads));
}

}  // namespace

ThreadPool::ThreadPool(int threads) : owner_(::getpid()) {
  check_threads(threads);
  start(threads);
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::resize(int threads) {
  check_threads(threads);
  const std::lock_guard lock(callers_);
  stop();
  start(threads);
}

void ThreadPool::run(std::uint64_t chunks, ChunkFunction function, void* context) {
  if (chunks == 0) return;
  Job job{function, context, chunks};
  std::unique_lock caller(callers_, std::try_to_lock);
  if (chunks == 1 || !caller.owns_lock() || workers_.empty() || ::getpid() != owner_) {
    work_on(job);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    ++job_number_;
  }
  job_posted_.notify_all();
  work_on(job);
  // `job` lives on this stack: it is withdrawn, and those who still run a chunk are waited for.
  std::unique_lock lock(mutex_);
  job_ = nullptr;
  workers_left_.wait(lock, [&] { return working_ == 0; });
}

void ThreadPool::work_on(Job& job) noexcept {
  const FlushDenormals mode;
  for (;;) {
    const std::uint64_t chunk = job.next.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= job.chunks) return;
    job.function(job.context, chunk);
  }
}

void ThreadPool::start(int threads) {
  stopping_ = false;
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { worker(); });
  threads_ = threads;
}

void ThreadPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  job_posted_.notify_all();
  for (std::thread& thread : workers_) thread.join();
  workers_.clear();
}

void ThreadPool::worker() {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    job_posted_.wait(lock, [&] { return stopping_ || (job_ != nullptr && job_number_ != seen); });
    if (stopping_) return;
    seen = job_number_;
    Job& job = *job_;
    ++working_;
    lock.unlock();
    work_on(job);
    lock.lock();
    if (--working_ == 0) workers_left_.notify_all();
  }
}

ThreadPool& kernel_pool() {
  static ThreadPool& pool = *new ThreadPool(usable_cores());
  return pool;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int count = ::sched_getaffinity(0, sizeof set, &set) == 0
                        ? CPU_COUNT(&set)
                        : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(count, 1, kMaxDefaultThreads);
}

#if defined(__x86_64__)

FlushDenormals::FlushDenormals() noexcept : saved_(_mm_getcsr()) {
  constexpr unsigned kExceptionsMaskedRoundNearest = 0x1F80;
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  _mm_setcsr(kExceptionsMaskedRoundNearest | kFlushToZero | kDenormalsAreZero);
}

FlushDenormals::~FlushDenormals() {
  _mm_setcsr(static_cast<unsigned>(saved_));
}

#elif defined(__aarch64__)

FlushDenormals::FlushDenormals() noexcept {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  constexpr std::uint64_t kFlushToZero = std::uint64_t{1} << 24;
  asm volatile("msr fpcr, %0" : : "r"(kFlushToZero));
}

FlushDenormals::~FlushDenormals() {
  asm volatile("msr fpcr, %0" : : "r"(saved_));
}

#else

FlushDenormals::FlushDenormals() noexcept : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;

#endif

}  // namespace memascend
