// SPDX-License-Identifier: Apache-2.0
#include "memascend/device_limits.hpp"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>

#include "check.hpp"
#include "scratch_file.hpp"

using namespace memascend;
using memascend::test::ScratchFile;
namespace fs = std::filesystem;

namespace {

// A sysfs in which the scratch file's device is a partition or a whole device.
struct Sysfs {
  explicit Sysfs(const ScratchFile& file, bool partition) : root(file.path() + ".sys") {
    struct stat status{};
    CHECK(::fstat(file.fd(), &status) == 0);
    const fs::path disk = root / "devices" / "disk";
    fs::create_directories(disk / "queue");
    fs::create_directories(disk / "disk1");
    fs::create_directories(root / "dev" / "block");
    std::ofstream(disk / "queue" / "max_sectors_kb") << 512 << "\n";
    std::ofstream(disk / "queue" / "max_segments") << 127 << "\n";
    fs::create_directory_symlink(partition ? disk / "disk1" : disk,
                                 root / "dev" / "block" /
                                     (std::to_string(gnu_dev_major(status.st_dev)) + ":" +
                                      std::to_string(gnu_dev_minor(status.st_dev))));
  }
  ~Sysfs() { fs::remove_all(root); }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;

  fs::path root;
};

DeviceLimits command_of(std::uint64_t nbytes) {
  return {nbytes, 0};
}

}  // namespace

TEST(limits_are_those_of_the_device_that_holds_the_file) {
  const ScratchFile file(4096);
  for (const bool partition : {false, true}) {
    const Sysfs sysfs(file, partition);
    const DeviceLimits limits = device_limits(file.fd(), sysfs.root.string());
    CHECK_EQUAL(limits.command_bytes, 512U * 1024);
    CHECK_EQUAL(limits.segments, 127U);
  }
}

TEST(limits_that_nobody_tells_are_not_known) {
  const ScratchFile file(4096);
  CHECK_EQUAL(device_limits(file.fd(), file.path() + ".none").command_bytes, 0U);
  CHECK_EQUAL(device_limits(-1).command_bytes, 0U);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  CHECK_EQUAL(device_limits(null).command_bytes, 0U);
  ::close(null);
}

TEST(a_request_is_made_of_whole_commands) {
  constexpr std::uint64_t kMib = 1U << 20;
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(0)), kMib);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(4 * kMib)), kMib);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(kMib)), kMib);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(kMib / 8)), kMib);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(768 * 1024)), 768U * 1024);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(508 * 1024)), 1016U * 1024);
  CHECK_EQUAL(fitted_request_bytes(kMib, command_of(1279)), kMib);  // less than a block: no use
  CHECK_EQUAL(fitted_request_bytes(4096, command_of(512 * 1024)), 4096U);
}
