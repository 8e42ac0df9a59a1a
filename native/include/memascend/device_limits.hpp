// SPDX-License-Identifier: Apache-2.0
// What a device takes in one command.
#pragma once

#include <cstdint>
#include <string>

namespace memascend {

// 0: not known (no block device behind the descriptor, or no sysfs).
struct DeviceLimits {
  std::uint64_t command_bytes = 0;  // max_sectors_kb: the kernel cuts what is larger
  std::uint32_t segments = 0;       // max_segments: pieces of memory that are not contiguous
};

// The limits of the block device behind a descriptor: the device itself, or the one that holds the
// file. Source: Documentation/ABI/stable/sysfs-block.
DeviceLimits device_limits(int fd, const std::string& sysfs = "/sys");

// The largest request not above `request_bytes` that the device takes in whole commands: a command
// cut short at the end of every request would cost as much as a full one. max_segments does not
// enter: where memory lies in huge pages it does not bind, and where it does the kernel's cut was
// measured to be as fast as ours.
std::uint64_t fitted_request_bytes(std::uint64_t request_bytes,
                                   const DeviceLimits& limits) noexcept;

}  // namespace memascend
