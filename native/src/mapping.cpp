// SPDX-License-Identifier: Apache-2.0
#include "memascend/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>

#include "memascend/error.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kAlignment = std::uint64_t{2} << 20;

// The size of a page: the system's, or the larger one that was asked for.
std::uint64_t checked_page(std::uint64_t asked) {
  if (asked == 0) return page_bytes();
  if (asked % page_bytes() != 0 || (asked & (asked - 1)) != 0 || asked > kAlignment)
    throw std::invalid_argument("page_bytes must be a power of two from " + grouped(page_bytes()) +
                                " to " + grouped(kAlignment) + ", got " + grouped(asked));
  return asked;
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

Mapping::Mapping(std::uint64_t nbytes, const MappingOptions& options)
    : page_bytes_(checked_page(options.page_bytes)), nbytes_(round_up(nbytes, page_bytes_)) {
  if (nbytes == 0) throw std::invalid_argument("cannot map 0 bytes; give a positive capacity");
  const std::uint64_t region_bytes = options.pin.region_bytes;
  if (region_bytes == 0 || region_bytes > kRegionBytes || region_bytes % page_bytes_ != 0)
    throw std::invalid_argument("region_bytes must be whole pages of at most " +
                                grouped(kRegionBytes) + " bytes, got " + grouped(region_bytes));
  reserve();
  try {
    // Advice is given before the first touch, or the pages would already be small ones.
    if (options.huge_pages) huge_pages_ = ::madvise(data_, nbytes_, MADV_HUGEPAGE) == 0;
    ::madvise(data_, nbytes_, MADV_DONTFORK);
    ::madvise(data_, nbytes_, MADV_DONTDUMP);
    pinning_ = std::make_unique<Pinning>(data_, nbytes_, options.pin);
  } catch (...) {
    ::munmap(data_, nbytes_);
    throw;
  }
}

Mapping::~Mapping() {
  pinning_.reset();
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

}  // namespace memascend
