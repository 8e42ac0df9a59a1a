// SPDX-License-Identifier: Apache-2.0
// What moves bytes between one descriptor and memory. A backend starts requests and reports how
// each one ended; splitting, resuming, retrying and error texts belong to Lane, once for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace memascend {

enum class Direction : std::uint8_t { kRead, kWrite };

// Urgent is what a computation waits for: it goes before all that is merely to be done some time.
enum class Priority : std::uint8_t { kUrgent, kNormal };

// One system call's worth of work.
struct Request {
  Direction direction;
  Priority priority;
  std::uint64_t offset;  // in bytes, in the member
  std::byte* address;
  std::uint64_t nbytes;
};

// `result` is what the call returned: bytes moved, or a negative errno.
struct Completion {
  std::uint32_t tag;
  std::int64_t result;
};

// Threading: `start` and `wait` are called by one thread only; `wake` and `sync` by any.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  virtual const char* name() const noexcept = 0;

  // Begins a request, or fails it through a completion. At most `queue_depth` tags are in flight,
  // each below it. The request's memory belongs to the backend until the completion is returned.
  virtual void start(const Request& request, std::uint32_t tag) noexcept = 0;

  // Sleeps until a request has ended or `wake` was called, then returns what has ended (possibly
  // nothing), at most `room` of them.
  virtual std::size_t wait(Completion* out, std::size_t room) noexcept = 0;

  // Makes the current or the next `wait` return.
  virtual void wake() noexcept = 0;

  // Makes the completed writes durable; 0 or an errno.
  virtual int sync() noexcept = 0;

  // Lets go of the descriptor and of registered memory; nothing is in flight and nothing comes any
  // more, but what follows can still be asked.
  virtual void shut_down() noexcept {}

  // Whether the registered regions and the registered descriptor are in use, and why not.
  virtual bool uses_registered_buffers() const noexcept { return false; }
  virtual bool uses_registered_file() const noexcept { return false; }
  virtual std::string registration_reason() const { return {}; }
};

using Region = std::pair<std::byte*, std::uint64_t>;

struct BackendOptions {
  int fd = -1;                            // not owned
  std::uint32_t queue_depth = 32;         // requests in flight
  std::uint32_t threads = 4;              // of the thread backend
  std::vector<Region> regions;            // memory to register, each at most 1 GiB
  const IoBackend* registered = nullptr;  // of the same kind, with the same regions registered
};

// Null with a reason when the kernel or the sandbox does not offer what is needed.
std::unique_ptr<IoBackend> try_uring_backend(const BackendOptions& options, std::string* reason,
                                             int* error_number);
std::unique_ptr<IoBackend> thread_backend(const BackendOptions& options);

}  // namespace memascend
