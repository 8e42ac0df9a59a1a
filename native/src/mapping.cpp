// SPDX-License-Identifier: Apache-2.0
#include "memascend/mapping.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>

#include "memascend/error.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kAlignment = std::uint64_t{2} << 20;

std::string memlock_limit_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return " (the limit of locked memory is " + grouped(limit.rlim_cur) +
         " bytes; raise it with `ulimit -l` or LimitMEMLOCK=)";
}

}  // namespace

std::uint64_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  const std::uint64_t rest = value % multiple;
  if (rest == 0) return value;
  if (value > std::numeric_limits<std::uint64_t>::max() - (multiple - rest))
    throw std::length_error("size of " + grouped(value) + " bytes is too large");
  return value + (multiple - rest);
}

Mapping::Mapping(std::uint64_t nbytes, PinMode mode, bool huge_pages)
    : nbytes_(round_up(nbytes, page_bytes())) {
  if (nbytes == 0) throw std::invalid_argument("cannot map 0 bytes; give a positive capacity");
  reserve();
  try {
    // Advice is given before the first touch, or the pages would already be small ones.
    if (huge_pages) huge_pages_ = ::madvise(data_, nbytes_, MADV_HUGEPAGE) == 0;
    ::madvise(data_, nbytes_, MADV_DONTFORK);
    ::madvise(data_, nbytes_, MADV_DONTDUMP);
    pin(mode);
  } catch (...) {
    ::munmap(data_, nbytes_);
    throw;
  }
}

Mapping::~Mapping() {
  ::munmap(data_, nbytes_);
}

// mmap aligns to pages only: map 2 MiB more than asked and cut the two ends off.
void Mapping::reserve() {
  if (nbytes_ > std::numeric_limits<std::size_t>::max() / 2)
    throw SystemError(ENOMEM, "cannot map " + grouped(nbytes_) + " bytes");
  const std::uint64_t padded = nbytes_ + kAlignment;
  void* raw = ::mmap(nullptr, padded, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    const int error = errno;
    throw SystemError(error, "cannot map " + grouped(nbytes_) + " bytes of anonymous memory: " +
                                 errno_text(error) + "; lower the arena's capacity");
  }
  auto* begin = static_cast<std::byte*>(raw);
  const auto misalignment = reinterpret_cast<std::uintptr_t>(begin) % kAlignment;
  const std::uint64_t head = misalignment == 0 ? 0 : kAlignment - misalignment;
  if (head > 0) ::munmap(begin, head);
  data_ = begin + head;
  if (padded - head > nbytes_) ::munmap(data_ + nbytes_, padded - head - nbytes_);
}

void Mapping::pin(PinMode mode) {
  if (mode == PinMode::kNone) {
    pinning_reason_ = "not asked for";
    return;
  }
  if (::mlock(data_, nbytes_) == 0) {
    pinned_ = true;
    return;
  }
  const int error = errno;
  pinning_reason_ = "cannot lock " + grouped(nbytes_) + " bytes in memory: " + errno_text(error) +
                    memlock_limit_text();
  // A refused mlock may leave a part locked and resident: let go of both.
  ::munlock(data_, nbytes_);
  ::madvise(data_, nbytes_, MADV_DONTNEED);
  if (mode == PinMode::kMlock) throw SystemError(error, pinning_reason_);
}

}  // namespace memascend
