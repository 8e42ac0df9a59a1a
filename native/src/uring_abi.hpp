// SPDX-License-Identifier: Apache-2.0
// The part of the kernel's io_uring interface that we use, stated here so that neither liburing nor
// recent kernel headers are needed to build. Names are ours, layouts are <linux/io_uring.h>'s
// (a test compares them where that header is installed). Numbers are the same on all architectures.
#pragma once

#include <cstdint>

namespace memascend::uring {

inline constexpr long kSysSetup = 425;
inline constexpr long kSysEnter = 426;
inline constexpr long kSysRegister = 427;

inline constexpr std::uint64_t kOffSqRing = 0;
inline constexpr std::uint64_t kOffSqes = 0x10000000ULL;

inline constexpr std::uint32_t kFeatureSingleMmap = 1U << 0;
inline constexpr std::uint32_t kFeatureNoDrop = 1U << 1;
inline constexpr std::uint32_t kSetupClamp = 1U << 4;
inline constexpr std::uint32_t kEnterGetEvents = 1U << 0;

inline constexpr std::uint32_t kRegisterBuffers = 0;
inline constexpr std::uint32_t kUnregisterBuffers = 1;
inline constexpr std::uint32_t kRegisterFiles = 2;
inline constexpr std::uint32_t kUnregisterFiles = 3;
inline constexpr std::uint32_t kRegisterProbe = 8;
inline constexpr std::uint32_t kRegisterCloneBuffers = 30;
inline constexpr std::uint8_t kSqeFixedFile = 1U << 0;
inline constexpr std::uint16_t kOpSupported = 1U << 0;

inline constexpr std::uint8_t kOpReadFixed = 4;
inline constexpr std::uint8_t kOpWriteFixed = 5;
inline constexpr std::uint8_t kOpRead = 22;
inline constexpr std::uint8_t kOpWrite = 23;

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
  std::uint64_t user_addr;
};

struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
  std::uint64_t user_addr;
};

struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
  std::uint32_t resv[3];
  SqOffsets sq_off;
  CqOffsets cq_off;
};

struct Sqe {
  std::uint8_t opcode;
  std::uint8_t flags;
  std::uint16_t ioprio;
  std::int32_t fd;
  std::uint64_t off;
  std::uint64_t addr;
  std::uint32_t len;
  std::uint32_t rw_flags;
  std::uint64_t user_data;
  std::uint16_t buf_index;
  std::uint16_t personality;
  std::int32_t splice_fd_in;
  std::uint64_t pad[2];
};

struct Cqe {
  std::uint64_t user_data;
  std::int32_t res;
  std::uint32_t flags;
};

struct CloneBuffers {
  std::uint32_t src_fd, flags, src_off, dst_off, nr;
  std::uint32_t pad[3];
};

struct ProbeOp {
  std::uint8_t op;
  std::uint8_t resv;
  std::uint16_t flags;
  std::uint32_t resv2;
};

struct Probe {
  std::uint8_t last_op;
  std::uint8_t ops_len;
  std::uint16_t resv;
  std::uint32_t resv2[3];
  ProbeOp ops[64];
};

static_assert(sizeof(Sqe) == 64 && sizeof(Cqe) == 16 && sizeof(Params) == 120 &&
              sizeof(CloneBuffers) == 32);

}  // namespace memascend::uring
