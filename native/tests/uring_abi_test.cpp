// SPDX-License-Identifier: Apache-2.0
// Our statement of the kernel's interface against the installed kernel header, where there is one
// that is new enough.
#include "uring_abi.hpp"

#include "check.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>

#include <cstddef>
#if defined(IORING_FEAT_NODROP) && defined(IO_URING_OP_SUPPORTED)
#define MEMASCEND_COMPARE 1
#endif
#endif

namespace uring = memascend::uring;

#if defined(MEMASCEND_COMPARE)

#define SAME_FIELD(ours, our_field, theirs, their_field)                      \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))

SAME_FIELD(uring::Sqe, opcode, io_uring_sqe, opcode);
SAME_FIELD(uring::Sqe, flags, io_uring_sqe, flags);
SAME_FIELD(uring::Sqe, fd, io_uring_sqe, fd);
SAME_FIELD(uring::Sqe, off, io_uring_sqe, off);
SAME_FIELD(uring::Sqe, addr, io_uring_sqe, addr);
SAME_FIELD(uring::Sqe, len, io_uring_sqe, len);
SAME_FIELD(uring::Sqe, user_data, io_uring_sqe, user_data);
SAME_FIELD(uring::Sqe, buf_index, io_uring_sqe, buf_index);
SAME_FIELD(uring::Cqe, user_data, io_uring_cqe, user_data);
SAME_FIELD(uring::Cqe, res, io_uring_cqe, res);
SAME_FIELD(uring::Params, sq_entries, io_uring_params, sq_entries);
SAME_FIELD(uring::Params, flags, io_uring_params, flags);
SAME_FIELD(uring::Params, features, io_uring_params, features);
SAME_FIELD(uring::SqOffsets, array, io_sqring_offsets, array);
SAME_FIELD(uring::CqOffsets, cqes, io_cqring_offsets, cqes);
static_assert(offsetof(uring::Params, sq_off) == offsetof(io_uring_params, sq_off));
static_assert(offsetof(uring::Params, cq_off) == offsetof(io_uring_params, cq_off));
static_assert(sizeof(uring::Sqe) == sizeof(io_uring_sqe));
static_assert(sizeof(uring::Params) == sizeof(io_uring_params));
SAME_FIELD(uring::ProbeOp, flags, io_uring_probe_op, flags);
static_assert(offsetof(uring::Probe, ops) == sizeof(io_uring_probe));

TEST(numbers_are_those_of_the_kernel_header) {
  CHECK_EQUAL(uring::kSysSetup, long{__NR_io_uring_setup});
  CHECK_EQUAL(uring::kSysEnter, long{__NR_io_uring_enter});
  CHECK_EQUAL(uring::kSysRegister, long{__NR_io_uring_register});
  CHECK_EQUAL(uring::kOffSqRing, IORING_OFF_SQ_RING);
  CHECK_EQUAL(uring::kOffSqes, IORING_OFF_SQES);
  CHECK_EQUAL(uring::kFeatureSingleMmap, IORING_FEAT_SINGLE_MMAP);
  CHECK_EQUAL(uring::kFeatureNoDrop, IORING_FEAT_NODROP);
  CHECK_EQUAL(uring::kSetupClamp, IORING_SETUP_CLAMP);
  CHECK_EQUAL(uring::kEnterGetEvents, IORING_ENTER_GETEVENTS);
  CHECK_EQUAL(uring::kRegisterBuffers, std::uint32_t{IORING_REGISTER_BUFFERS});
  CHECK_EQUAL(uring::kUnregisterBuffers, std::uint32_t{IORING_UNREGISTER_BUFFERS});
  CHECK_EQUAL(uring::kRegisterFiles, std::uint32_t{IORING_REGISTER_FILES});
  CHECK_EQUAL(uring::kUnregisterFiles, std::uint32_t{IORING_UNREGISTER_FILES});
  CHECK_EQUAL(uint32_t{uring::kSqeFixedFile}, uint32_t{IOSQE_FIXED_FILE});
  CHECK_EQUAL(uring::kRegisterProbe, std::uint32_t{IORING_REGISTER_PROBE});
  CHECK_EQUAL(uring::kOpSupported, IO_URING_OP_SUPPORTED);
  CHECK_EQUAL(int{uring::kOpRead}, int{IORING_OP_READ});
  CHECK_EQUAL(int{uring::kOpWrite}, int{IORING_OP_WRITE});
  CHECK_EQUAL(int{uring::kOpReadFixed}, int{IORING_OP_READ_FIXED});
  CHECK_EQUAL(int{uring::kOpWriteFixed}, int{IORING_OP_WRITE_FIXED});
}

#else

TEST(no_kernel_header_to_compare_with) {
  CHECK(sizeof(uring::Sqe) == 64);
}

#endif
