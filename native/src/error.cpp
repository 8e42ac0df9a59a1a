// SPDX-License-Identifier: Apache-2.0
#include "memascend/error.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace memascend {
namespace {

const char* errno_name(int error_number) noexcept {
  switch (error_number) {
    case EPERM:
      return "EPERM";
    case EINTR:
      return "EINTR";
    case EIO:
      return "EIO";
    case ENXIO:
      return "ENXIO";
    case EBADF:
      return "EBADF";
    case EAGAIN:
      return "EAGAIN";
    case ENOMEM:
      return "ENOMEM";
    case EACCES:
      return "EACCES";
    case EFAULT:
      return "EFAULT";
    case EBUSY:
      return "EBUSY";
    case ENODEV:
      return "ENODEV";
    case EINVAL:
      return "EINVAL";
    case EFBIG:
      return "EFBIG";
    case ENOSPC:
      return "ENOSPC";
    case ESPIPE:
      return "ESPIPE";
    case EROFS:
      return "EROFS";
    case ENOSYS:
      return "ENOSYS";
    case EOVERFLOW:
      return "EOVERFLOW";
    case EOPNOTSUPP:
      return "EOPNOTSUPP";
    case ECANCELED:
      return "ECANCELED";
    case EDQUOT:
      return "EDQUOT";
    case ETIMEDOUT:
      return "ETIMEDOUT";
    case EILSEQ:
      return "EILSEQ";
    default:
      return nullptr;
  }
}

}  // namespace

SystemError::SystemError(int error_number, std::string text, std::string path)
    : std::system_error(error_number, std::generic_category()),
      text_(std::move(text)),
      path_(std::move(path)) {}

std::string errno_text(int error_number) {
  const std::string text = std::generic_category().message(error_number);
  const char* name = errno_name(error_number);
  return text + " [" + (name != nullptr ? name : "errno " + std::to_string(error_number)) + "]";
}

std::string io_remedy(int error_number) {
  switch (error_number) {
    case EIO:
    case EILSEQ:
    case ETIMEDOUT:
    case ENODEV:
    case ENXIO:
      return "the device failed or went away; see the kernel log (dmesg)";
    case EINVAL:
      return "direct I/O needs offset, length and address to be multiples of the device's block";
    case ENOSPC:
    case EDQUOT:
      return "free space on the file system or raise the quota";
    case EROFS:
    case EPERM:
    case EACCES:
      return "make the path writable for this user";
    case EBADF:
      return "the descriptor is closed or not open for this direction";
    case ECANCELED:
      return "the engine was closed before the request began";
    case ENOMEM:
      return "the kernel had no memory for the request; lower the queue depth";
    default:
      return {};
  }
}

std::string grouped(std::uint64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string path_of_descriptor(int fd) {
  char target[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), target, sizeof target);
  return length <= 0 ? std::string{} : std::string(target, static_cast<std::size_t>(length));
}

}  // namespace memascend
