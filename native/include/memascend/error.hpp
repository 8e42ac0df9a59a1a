// SPDX-License-Identifier: Apache-2.0
// Failures of the system, with the number, the sentence and the path a caller needs.
#pragma once

#include <cstdint>
#include <string>
#include <system_error>

namespace memascend {

// A failed system call. `what` is the whole sentence for the user; `code().value()` is errno.
class SystemError : public std::system_error {
 public:
  SystemError(int error_number, std::string text, std::string path = {});

  const char* what() const noexcept override { return text_.c_str(); }
  const std::string& path() const noexcept { return path_; }

 private:
  std::string text_;
  std::string path_;
};

// "Input/output error [EIO]"
std::string errno_text(int error_number);

// One sentence that says what the user can do about this errno of a read or write; may be empty.
std::string io_remedy(int error_number);

// "1,048,576"
std::string grouped(std::uint64_t value);

// The path an open descriptor stands for, or "" when /proc does not tell.
std::string path_of_descriptor(int fd);

}  // namespace memascend
