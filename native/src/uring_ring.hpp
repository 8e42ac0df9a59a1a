// SPDX-License-Identifier: Apache-2.0
// One io_uring instance: its descriptor, its shared rings, and the three system calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "uring_abi.hpp"

namespace memascend::uring {

// Threading: one thread submits and reaps.
class Ring {
 public:
  // Null, with the errno and a sentence, when the kernel or the sandbox does not offer what is
  // needed. Everything is looked at before the first use, so that a ring that exists works.
  static std::unique_ptr<Ring> open(std::uint32_t entries, std::string* reason, int* error_number);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0 or an errno. Pins the memory, and counts it against the limit of locked memory.
  int register_buffers(const std::vector<std::pair<std::byte*, std::uint64_t>>& regions);

  // Takes over what another ring has registered, which pins and counts nothing again (Linux 6.12).
  int clone_buffers(const Ring& from);
  // Makes the descriptor known as number 0, for entries with kSqeFixedFile. 0 or an errno.
  int register_file(int fd);

  // Queues one entry for the next `enter`; never more than `entries` between two of them.
  void push(const Sqe& sqe) noexcept;
  // Hands what is queued to the kernel and sleeps until at least one completion is there. 0 or an
  // errno; what the kernel did not take stays queued.
  int enter() noexcept;
  // Withdraws one entry that the kernel did not take; false when there is none.
  bool withdraw(Sqe* sqe) noexcept;
  bool pop(Cqe* cqe) noexcept;

 private:
  Ring() = default;
  int set_up(std::uint32_t entries, std::string* reason);
  int map(const Params& params, std::string* reason);
  int probe(std::string* reason) const;

  int fd_ = -1;
  bool has_buffers_ = false;
  bool has_file_ = false;
  std::byte* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  Sqe* sqes_ = nullptr;
  std::size_t sqes_bytes_ = 0;
  std::uint32_t* sq_head_ = nullptr;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t* sq_array_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  Cqe* cqes_ = nullptr;
  std::uint32_t cq_mask_ = 0;
};

}  // namespace memascend::uring
