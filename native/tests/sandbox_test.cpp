// SPDX-License-Identifier: Apache-2.0
// What happens where the system forbids something: each case runs in a child with less rights.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>

#include "check.hpp"
#include "memascend/arena.hpp"
#include "memascend/io_engine.hpp"
#include "scratch_file.hpp"
#include "uring_abi.hpp"
#include "uring_ring.hpp"

using namespace memascend;
using memascend::test::ScratchFile;

namespace {

// Runs `body` in a child and passes its failure on.
void in_child(const std::function<void()>& body) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string failure;
    try {
      body();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    const bool told = ::write(ends[1], failure.data(), failure.size()) >= 0;
    ::_exit(failure.empty() && told ? 0 : 1);
  }
  ::close(ends[1]);
  char text[2048] = {};
  const ssize_t length = ::read(ends[0], text, sizeof text - 1);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw memascend::test::Failed(length > 0 ? text : "the child died");
}

// From here on io_uring_setup fails with `error_number`, as in a container. False where the kernel
// (or an emulator of one) has no such filters.
bool forbid_io_uring(unsigned error_number) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(uring::kSysSetup), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error_number),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{sizeof filter / sizeof filter[0], filter};
  CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0) return true;
  CHECK_EQUAL(errno, EINVAL);
  return false;
}

// Root may lock any amount: the limit bites for others only.
void limit_locked_memory(std::uint64_t bytes) {
  const rlimit limit{bytes, bytes};
  CHECK(::setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  if (::getuid() == 0) {
    CHECK(::setgid(65534) == 0);
    CHECK(::setuid(65534) == 0);
  }
}

void check_write_and_read(const IoOptions& options, const std::shared_ptr<PinnedArena>& arena) {
  IoEngine engine(options);
  const auto slot = arena->allocate(65536, "s");
  std::memset(slot->data(), 0x5A, slot->nbytes());
  engine.submit(Direction::kWrite, {{0, 0, slot->data(), slot->nbytes()}})->wait();
  std::memset(slot->data(), 0, slot->nbytes());
  engine.submit(Direction::kRead, {{0, 0, slot->data(), slot->nbytes()}})->wait();
  CHECK(slot->data()[65535] == std::byte{0x5A});
}

}  // namespace

TEST(forbidden_io_uring_falls_back_to_threads_and_says_why) {
  const ScratchFile file(1 << 20);
  for (const unsigned error_number : {unsigned{EPERM}, unsigned{ENOSYS}})
    in_child([&] {
      if (!forbid_io_uring(error_number)) return;
      IoOptions options;
      options.fds = {file.fd()};
      {
        const IoEngine engine(options);
        CHECK_EQUAL(engine.backend(), "threads");
        const char* part = error_number == EPERM ? "forbidden here" : "has no io_uring";
        CHECK(engine.backend_reason().find(part) != std::string::npos);
      }
      check_write_and_read(options, PinnedArena::create(1 << 20, PinMode::kNone, true));
    });
}

TEST(forbidden_io_uring_is_an_error_when_asked_for) {
  const ScratchFile file(1 << 20);
  in_child([&] {
    if (!forbid_io_uring(EPERM)) return;
    IoOptions options;
    options.fds = {file.fd()};
    options.backend = "io_uring";
    CHECK_THROWS(IoEngine{options}, SystemError, "cannot use io_uring: io_uring is forbidden here");
  });
}

// Sanitizers make mlock do nothing and succeed.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(memory_that_may_not_be_locked_is_pageable_with_the_limit_named) {
  in_child([] {
    limit_locked_memory(65536);
    const auto arena = PinnedArena::create(4 << 20, PinMode::kAuto, true);
    CHECK(arena->rung() == Rung::kPageable);
    CHECK(arena->pinning_reason().find("limit of locked memory is 65,536 bytes") !=
          std::string::npos);
    CHECK_THROWS(PinnedArena::create(4 << 20, PinMode::kMlock, true), SystemError,
                 "cannot lock 4,194,304 bytes");
    CHECK(PinnedArena::create(16384, PinMode::kMlock, true)->rung() == Rung::kMlock);
  });
}
#endif

TEST(memory_that_may_not_be_registered_is_used_unregistered) {
  const ScratchFile file(1 << 20);
  in_child([&] {
    limit_locked_memory(1 << 20);
    const auto arena = PinnedArena::create(8 << 20, PinMode::kNone, true);
    IoOptions options;
    options.fds = {file.fd()};
    options.regions = arena->regions();
    {
      const IoEngine engine(options);
      if (engine.backend() != "io_uring") return;
      CHECK(!engine.uses_registered_buffers());
      CHECK(engine.registration_reason().find("refused to register") != std::string::npos);
    }
    check_write_and_read(options, arena);
  });
}

// Five rings that each pinned the memory anew would need 20 MiB.
TEST(members_count_once_against_the_limit_of_locked_memory) {
  std::string reason;
  int error = 0;
  const auto first = uring::Ring::open(1, &reason, &error);
  const auto second = uring::Ring::open(1, &reason, &error);
  if (first == nullptr || second == nullptr) return;
  const auto memory = PinnedArena::create(4096, PinMode::kNone, false);
  CHECK_EQUAL(first->register_buffers(memory->regions()), 0);
  const int refused = second->clone_buffers(*first);
  if (refused == EINVAL) return;  // before Linux 6.12
  CHECK_EQUAL(refused, 0);
  const ScratchFile file(1 << 20);
  in_child([&] {
    limit_locked_memory(6 << 20);
    const auto arena = PinnedArena::create(4 << 20, PinMode::kNone, true);
    IoOptions options;
    options.fds = {file.fd(), file.fd(), file.fd(), file.fd(), file.fd()};
    options.backend = "io_uring";
    options.queue_depth = 4;
    options.regions = arena->regions();
    CHECK_EQUAL(IoEngine(options).registration_reason(), "");
    check_write_and_read(options, arena);
  });
}
