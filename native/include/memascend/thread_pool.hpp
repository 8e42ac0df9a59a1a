// SPDX-License-Identifier: Apache-2.0
// The fixed threads that the kernels share. They sleep between jobs: a spinning pool (OpenMP's)
// would fight with XLA's for the cores.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace memascend {

// Runs a job's chunks [0, chunks) on the caller and the pool's threads. Which thread runs which
// chunk is not fixed, so a job must give the same result for any assignment.
//
// Nothing is allocated per job. One job runs at a time; a caller that finds the pool busy, and a
// child of fork (which has no threads), runs its chunks alone.
class ThreadPool {
 public:
  // A chunk must not throw. Denormals are flushed to zero while it runs, see FlushDenormals.
  using ChunkFunction = void (*)(void* context, std::uint64_t chunk) noexcept;

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The threads that work on a job, the caller included.
  int threads() const noexcept { return threads_.load(std::memory_order_relaxed); }
  void resize(int threads);

  template <typename Function>
  void parallel_for(std::uint64_t chunks, Function& function) {
    run(
        chunks,
        [](void* context, std::uint64_t chunk) noexcept {
          (*static_cast<Function*>(context))(chunk);
        },
        &function);
  }

  void run(std::uint64_t chunks, ChunkFunction function, void* context);

 private:
  struct Job {
    ChunkFunction function;
    void* context;
    std::uint64_t chunks;
    std::atomic<std::uint64_t> next{0};
  };

  static void work_on(Job& job) noexcept;
  void start(int threads);
  void stop();
  void worker();

  std::mutex callers_;  // held by the caller whose job runs, and by resize
  std::mutex mutex_;
  std::condition_variable job_posted_;
  std::condition_variable workers_left_;
  Job* job_ = nullptr;
  std::uint64_t job_number_ = 0;
  int working_ = 0;
  bool stopping_ = false;
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  pid_t owner_;
};

// The process's pool; never destroyed, since threads may outlive static destruction.
ThreadPool& kernel_pool();

// The cores this process may run on, at most 16.
int usable_cores();

// Flushes denormals (inputs and results) to zero while alive, whatever the thread was set to. XLA
// does the same on CPU, and without it the moments of rows that get no gradient decay into
// denormals and stay there, at more than a hundred cycles per operation on many processors. Fixing
// the mode also makes results independent of what another library set on the calling thread.
class FlushDenormals {
 public:
  FlushDenormals() noexcept;
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace memascend
