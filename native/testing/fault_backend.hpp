// SPDX-License-Identifier: Apache-2.0
// An I/O backend that fails on purpose, over real files, to test what stands on it.
//
// What must be survived:
//   short transfers, interruptions   by the engine: the caller sees nothing
//   errors                           by the caller: the ticket throws, the store stays usable
//   completions in another order     by everyone: no order is promised
//   a crash                          by the store: of the writes since the last sync, any subset of
//                                    their 512-byte sectors is on the disk, nothing else is lost
// All randomness comes from one seed and the order of requests, so a failure can be repeated.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "memascend/io_backend.hpp"

namespace memascend::testing {

struct FaultPlan {
  std::uint64_t seed = 0;
  double error_rate = 0;                 // of requests that fail with `error_number`
  int error_number = 5;                  // EIO
  double short_rate = 0;                 // of requests that move only a part, of any length
  double interrupt_rate = 0;             // of requests that end with EINTR or EAGAIN, nothing moved
  bool reorder = false;                  // whether requests are done in random order
  bool require_aligned = false;          // EINVAL unless all is a multiple of 512, as direct I/O
  std::uint64_t crash_after_writes = 0;  // the crash replaces this write (1: the first); 0: never
  bool fail_sync = false;                // whether syncs fail with `error_number`
};

// The requests are done by the thread that waits, so that their order is reproducible.
class FaultBackend final : public IoBackend {
 public:
  static constexpr std::uint64_t kSector = 512;

  // Opens the file anew, without O_DIRECT: the crash rewrites single sectors.
  FaultBackend(int fd, const FaultPlan& plan);
  ~FaultBackend() override;

  const char* name() const noexcept override { return "fault"; }
  void start(const Request& request, std::uint32_t tag) noexcept override;
  std::size_t wait(Completion* out, std::size_t room) noexcept override;
  void wake() noexcept override;
  int sync() noexcept override;

  // Goes on with other faults; what is on the disks and in the journal stays.
  void set_plan(const FaultPlan& plan);
  // The power goes: unsynced sectors persist at random, everything from here on fails with EIO.
  void crash();
  bool crashed() const;

 private:
  struct Work {
    Request request;
    std::uint32_t tag;
  };
  // What a write replaced and what it put there.
  struct Written {
    std::uint64_t offset;
    std::vector<std::byte> before;
    std::vector<std::byte> after;
  };

  std::int64_t perform(const Request& request);
  std::int64_t read(const Request& request, std::uint64_t nbytes) const;
  std::int64_t write(const Request& request, std::uint64_t nbytes);
  void crash_locked();
  bool happens(double rate);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int fd_;
  FaultPlan plan_;
  std::mt19937_64 random_;
  std::vector<Work> to_do_;
  std::vector<Written> journal_;
  std::uint64_t writes_ = 0;
  bool woken_ = false;
  bool crashed_ = false;
};

}  // namespace memascend::testing
