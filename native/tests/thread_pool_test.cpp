// SPDX-License-Identifier: Apache-2.0
#include "memascend/thread_pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <limits>

#include "check.hpp"

using namespace memascend;

TEST(every_chunk_runs_once) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK_EQUAL(pool.threads(), threads);
    for (const std::uint64_t chunks : {0U, 1U, 2U, 1000U}) {
      std::vector<std::atomic<int>> runs(chunks);
      auto one = [&](std::uint64_t chunk) noexcept { runs[chunk].fetch_add(1); };
      pool.parallel_for(chunks, one);
      for (const auto& count : runs) CHECK_EQUAL(count.load(), 1);
    }
  }
}

TEST(callers_on_many_threads_each_get_their_job_done) {
  ThreadPool pool(3);
  std::atomic<std::uint64_t> sum{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        std::atomic<std::uint64_t> mine{0};
        auto one = [&](std::uint64_t chunk) noexcept { mine.fetch_add(chunk); };
        pool.parallel_for(20, one);
        sum.fetch_add(mine.load());
      }
    });
  for (std::thread& caller : callers) caller.join();
  CHECK_EQUAL(sum.load(), 4U * 300U * 190U);
}

TEST(the_number_of_threads_can_change_between_jobs) {
  ThreadPool pool(1);
  for (const int threads : {4, 2, 1, 3}) {
    pool.resize(threads);
    std::atomic<int> count{0};
    auto one = [&](std::uint64_t) noexcept { count.fetch_add(1); };
    pool.parallel_for(64, one);
    CHECK_EQUAL(count.load(), 64);
  }
  CHECK_THROWS(pool.resize(0), std::invalid_argument, "1 to");
}

TEST(a_child_of_fork_works_alone) {
  ThreadPool pool(4);
  const pid_t child = ::fork();
  if (child == 0) {
    std::atomic<int> count{0};
    auto one = [&](std::uint64_t) noexcept { count.fetch_add(1); };
    pool.parallel_for(64, one);
    ::_exit(count.load() == 64 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(denormals_are_flushed_in_a_chunk_and_the_callers_mode_comes_back) {
  ThreadPool pool(2);
  volatile float tiny = std::numeric_limits<float>::denorm_min();
  std::atomic<int> flushed{0};
  auto one = [&](std::uint64_t) noexcept { flushed.fetch_add(tiny * 1.0F == 0.0F ? 1 : 0); };
  pool.parallel_for(16, one);
  CHECK_EQUAL(flushed.load(), 16);
  CHECK(tiny * 1.0F != 0.0F);
}
