// SPDX-License-Identifier: Apache-2.0
// A file for I/O tests, opened for direct I/O where the file system allows it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "memascend/error.hpp"

namespace memascend::test {

class ScratchFile {
 public:
  explicit ScratchFile(std::uint64_t nbytes) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder != nullptr ? folder : "/var/tmp") + "/memascend_test_XXXXXX";
    const int created = ::mkstemp(path_.data());
    if (created < 0) throw SystemError(errno, "cannot create " + path_);
    if (::posix_fallocate(created, 0, static_cast<off_t>(nbytes)) != 0)
      throw SystemError(ENOSPC, "cannot reserve " + path_);
    ::close(created);
    fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
    if (fd_ < 0) fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  }
  ~ScratchFile() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  void truncate(std::uint64_t nbytes) const {
    if (::truncate(path_.c_str(), static_cast<off_t>(nbytes)) != 0)
      throw SystemError(errno, "cannot truncate " + path_);
  }

  // The contents, read apart from what is tested.
  std::vector<std::byte> contents(std::uint64_t nbytes) const {
    std::vector<std::byte> bytes(nbytes);
    const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const ssize_t got = ::pread(fd, bytes.data(), nbytes, 0);
    ::close(fd);
    bytes.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
    return bytes;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace memascend::test
