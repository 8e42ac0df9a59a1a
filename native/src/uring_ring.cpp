// SPDX-License-Identifier: Apache-2.0
// Source: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#include "uring_ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "memascend/error.hpp"

namespace memascend::uring {
namespace {

// The kernel reads and writes the ring indices at the same time; pairs of release and acquire order
// an index with the entries it announces.
std::uint32_t load_acquire(const std::uint32_t* index) noexcept {
  return __atomic_load_n(index, __ATOMIC_ACQUIRE);
}

void store_release(std::uint32_t* index, std::uint32_t value) noexcept {
  __atomic_store_n(index, value, __ATOMIC_RELEASE);
}

std::string setup_reason(int error_number) {
  switch (error_number) {
    case ENOSYS:
      return "this kernel has no io_uring, or a sandbox (seccomp) hides it";
    case EPERM:
    case EACCES:
      return "io_uring is forbidden here, by a container's seccomp profile or by "
             "kernel.io_uring_disabled";
    case ENOMEM:
      return "not enough locked memory for the rings (ulimit -l)";
    case EMFILE:
    case ENFILE:
      return "too many open files";
    default:
      return "io_uring_setup failed: " + errno_text(error_number);
  }
}

}  // namespace

std::unique_ptr<Ring> Ring::open(std::uint32_t entries, std::string* reason, int* error_number) {
  std::unique_ptr<Ring> ring(new Ring);
  *error_number = ring->set_up(entries, reason);
  if (*error_number != 0) return nullptr;
  return ring;
}

// What is registered goes first: the kernel takes a closed ring apart later, on a thread of its
// own, and until then the file would stay open and locked and the memory pinned.
Ring::~Ring() {
  if (has_file_) ::syscall(kSysRegister, fd_, kUnregisterFiles, nullptr, 0U);
  if (has_buffers_) ::syscall(kSysRegister, fd_, kUnregisterBuffers, nullptr, 0U);
  if (sqes_ != nullptr) ::munmap(sqes_, sqes_bytes_);
  if (rings_ != nullptr) ::munmap(rings_, rings_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

int Ring::set_up(std::uint32_t entries, std::string* reason) {
  Params params{};
  params.flags = kSetupClamp;
  fd_ = static_cast<int>(::syscall(kSysSetup, entries, &params));
  if (fd_ < 0) {
    const int error = errno;
    *reason = setup_reason(error);
    return error;
  }
  if ((params.features & kFeatureSingleMmap) == 0 || (params.features & kFeatureNoDrop) == 0 ||
      params.sq_entries < entries) {
    *reason = "this kernel's io_uring is too old (5.6 or later is needed)";
    return ENOSYS;
  }
  if (const int error = probe(reason); error != 0) return error;
  return map(params, reason);
}

int Ring::probe(std::string* reason) const {
  Probe probe{};
  constexpr std::uint32_t kOps = sizeof probe.ops / sizeof probe.ops[0];
  if (::syscall(kSysRegister, fd_, kRegisterProbe, &probe, kOps) < 0) {
    *reason = "this kernel's io_uring cannot be probed (5.6 or later is needed)";
    return errno;
  }
  for (const std::uint8_t op : {kOpRead, kOpWrite, kOpReadFixed, kOpWriteFixed}) {
    if (op <= probe.last_op && (probe.ops[op].flags & kOpSupported) != 0) continue;
    *reason = "this kernel's io_uring lacks operation " + std::to_string(op) +
              " (5.6 or later is needed)";
    return EOPNOTSUPP;
  }
  return 0;
}

int Ring::map(const Params& params, std::string* reason) {
  const auto mapped = [&](std::size_t bytes, std::uint64_t offset) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                      static_cast<off_t>(offset));
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  };
  rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(std::uint32_t),
                          params.cq_off.cqes + params.cq_entries * sizeof(Cqe));
  sqes_bytes_ = params.sq_entries * sizeof(Sqe);
  rings_ = mapped(rings_bytes_, kOffSqRing);
  if (rings_ != nullptr) sqes_ = reinterpret_cast<Sqe*>(mapped(sqes_bytes_, kOffSqes));
  if (sqes_ == nullptr) {
    const int error = errno;
    *reason = "cannot map the rings of io_uring: " + errno_text(error);
    return error;
  }
  const auto word = [&](std::uint32_t offset) {
    return reinterpret_cast<std::uint32_t*>(rings_ + offset);
  };
  sq_head_ = word(params.sq_off.head);
  sq_tail_ = word(params.sq_off.tail);
  sq_mask_ = *word(params.sq_off.ring_mask);
  sq_array_ = word(params.sq_off.array);
  cq_head_ = word(params.cq_off.head);
  cq_tail_ = word(params.cq_off.tail);
  cq_mask_ = *word(params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<Cqe*>(rings_ + params.cq_off.cqes);
  return 0;
}

int Ring::register_buffers(const std::vector<std::pair<std::byte*, std::uint64_t>>& regions) {
  std::vector<iovec> buffers;
  for (const auto& [address, nbytes] : regions) buffers.push_back({address, nbytes});
  const long result = ::syscall(kSysRegister, fd_, kRegisterBuffers, buffers.data(),
                                static_cast<unsigned>(buffers.size()));
  has_buffers_ = result >= 0;
  return has_buffers_ ? 0 : errno;
}

int Ring::clone_buffers(const Ring& from) {
  CloneBuffers clone{};
  clone.src_fd = static_cast<std::uint32_t>(from.fd_);
  has_buffers_ = ::syscall(kSysRegister, fd_, kRegisterCloneBuffers, &clone, 1U) >= 0;
  return has_buffers_ ? 0 : errno;
}

int Ring::register_file(int fd) {
  has_file_ = ::syscall(kSysRegister, fd_, kRegisterFiles, &fd, 1U) >= 0;
  return has_file_ ? 0 : errno;
}

void Ring::push(const Sqe& sqe) noexcept {
  const std::uint32_t tail = *sq_tail_;
  const std::uint32_t index = tail & sq_mask_;
  sqes_[index] = sqe;
  sq_array_[index] = index;
  store_release(sq_tail_, tail + 1);
}

int Ring::enter() noexcept {
  const std::uint32_t queued = *sq_tail_ - load_acquire(sq_head_);
  // Completions that are already there must not be slept on, but new entries still go out.
  const bool ready = load_acquire(cq_tail_) != *cq_head_;
  if (ready && queued == 0) return 0;
  const long result = ::syscall(kSysEnter, fd_, queued, ready ? 0U : 1U, kEnterGetEvents,
                                static_cast<void*>(nullptr), std::size_t{0});
  return result < 0 ? errno : 0;
}

bool Ring::withdraw(Sqe* sqe) noexcept {
  const std::uint32_t tail = *sq_tail_;
  if (tail == load_acquire(sq_head_)) return false;
  *sqe = sqes_[(tail - 1) & sq_mask_];
  store_release(sq_tail_, tail - 1);
  return true;
}

bool Ring::pop(Cqe* cqe) noexcept {
  const std::uint32_t head = *cq_head_;
  if (head == load_acquire(cq_tail_)) return false;
  *cqe = cqes_[head & cq_mask_];
  store_release(cq_head_, head + 1);
  return true;
}

}  // namespace memascend::uring
