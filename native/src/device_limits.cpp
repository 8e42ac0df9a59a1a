// SPDX-License-Identifier: Apache-2.0
#include "memascend/device_limits.hpp"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>

namespace memascend {
namespace {

// A partition has no queue of its own: its folder lies in that of the whole device.
std::uint64_t queue_limit(const std::string& device, const char* name) {
  for (const char* queue : {"/queue/", "/../queue/"}) {
    std::ifstream file(device + queue + name);
    std::uint64_t value = 0;
    if (file >> value) return value;
  }
  return 0;
}

}  // namespace

DeviceLimits device_limits(int fd, const std::string& sysfs) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) return {};
  if (!S_ISBLK(status.st_mode) && !S_ISREG(status.st_mode)) return {};
  const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  const std::string folder = sysfs + "/dev/block/" + std::to_string(::gnu_dev_major(device)) + ":" +
                             std::to_string(::gnu_dev_minor(device));
  return {queue_limit(folder, "max_sectors_kb") * 1024,
          static_cast<std::uint32_t>(queue_limit(folder, "max_segments"))};
}

std::uint64_t fitted_request_bytes(std::uint64_t request_bytes,
                                   const DeviceLimits& limits) noexcept {
  constexpr std::uint64_t kBlock = 4096;
  const std::uint64_t command = limits.command_bytes / kBlock * kBlock;
  if (command == 0 || command >= request_bytes) return request_bytes;
  return request_bytes / command * command;
}

}  // namespace memascend
