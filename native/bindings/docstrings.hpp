// SPDX-License-Identifier: Apache-2.0
// What `help()` shows of the longer bindings.
#pragma once

namespace memascend::docs {

inline constexpr const char* kArenaDoc =
    R"(Owns page-aligned host memory of exactly the size asked for.

One anonymous mapping, aligned to 2 MiB so that huge pages can back it, from which slots are taken
by best fit. Nothing is rounded up but to whole pages.

Args:
    capacity_bytes: size of the mapping, rounded up to pages.
    pin: "auto" locks the memory if it may, else goes on with pageable memory and keeps the reason;
        "device" registers it with the CUDA driver, and locks what that refuses; "mlock" raises
        OSError when refused; "none" does not try.
    huge_pages: advise the kernel to use huge pages.
    lockable_bytes: the most that is locked; default no limit but the kernel's.
    region_bytes: what is registered as one piece, whole pages, at most 1 GiB.
    page_bytes: what sizes are rounded to, a power of two; 0 is the system's page.
    cuda_ordinal: which visible CUDA device pin="device" registers with.

Raises:
    OSError: the memory cannot be mapped or locked.

Threading: every method may be called from any thread.
Lifetime: slots, their views and their exports keep the memory mapped.

Example:
    >>> arena = PinnedArena(1 << 20)
    >>> slot = arena.allocate(4096, "weights")
    >>> slot.view(0, 4096)[:] = 0
    >>> slot.release()
    >>> arena.close()
)";

inline constexpr const char* kAllocateDoc = R"(Returns a page-aligned slot of exactly nbytes.

Raises:
    MemoryError: no free piece holds it; tells how much is free, and how much in one piece.
    RuntimeError: the arena is closed.
)";

inline constexpr const char* kCloseDoc =
    R"(Gives the memory up; it is unmapped when the last view and export are gone.

Raises:
    RuntimeError: slots are outstanding.
)";

inline constexpr const char* kPinnedRegionsDoc =
    R"(Returns how each region is held in place, one dict per region of at most region_bytes.

rung: "device", "mlock" or "pageable"; locked_bytes of a pageable one are locked all the same.
registered_by: who registered it with the device. refusals: (rung, bytes, reason) of what was tried
in vain. Empty after close().
)";

inline constexpr const char* kRegisterWithDoc =
    R"(Registers every region that is not yet; what the driver refuses stays, with the reason.

Lifetime: undone when the memory is unmapped, after the last slot, view and export.
)";

inline constexpr const char* kNoteRegisteredDoc =
    R"(Says that `by` has registered a region with a device; close() refuses until that is undone.

Raises:
    IndexError: no such region.
    RuntimeError: it is registered already.
)";

inline constexpr const char* kCudaDriverDoc =
    R"(The CUDA driver's primary context of one visible device, retained while this lives.

Raises:
    RuntimeError: libcuda.so.1 cannot be loaded, or its call and error by name.

Threading: every method may be called from any thread.
)";

inline constexpr const char* kCopyToHostDoc =
    R"(Copies from device memory, which must be complete, and waits without the GIL.

By DMA when [dst_address, dst_address + nbytes) lies in one registered region.

Raises:
    RuntimeError: the driver's error by name.
)";

inline constexpr const char* kSlotDoc = R"(A piece of an arena, a writable buffer of bytes.

Goes back to the arena at release(), or when the slot, its views and its exports are all gone.
readers counts the live exports: objects made by dlpack() and the arrays that consumers made of them.
)";

inline constexpr const char* kViewDoc =
    R"(Returns a writable uint8 array over [offset, offset + nbytes), not a copy.

It keeps the slot allocated until release(), and the memory mapped as long as it lives.

Raises:
    IndexError: the range leaves the slot.
    RuntimeError: the slot is released.
)";

inline constexpr const char* kDlpackDoc =
    R"(Returns a DLPack producer over part of the slot, for jax.dlpack.from_dlpack.

Args:
    dtype: "bfloat16", "float16", "float32", "float64", "int8" to "uint64" or "bool".
    shape: of a C-contiguous tensor.
    offset_bytes: where it begins, a multiple of 64: XLA would copy otherwise.
    cuda_ordinal: consumers are told that the memory is pinned host memory of this CUDA device.

Lifetime: producer and consumers count as readers and keep the memory mapped. Consumers may drop it
on any thread, without the GIL, also after everything else is gone.
)";

inline constexpr const char* kSlotReleaseDoc =
    R"(Gives the memory back to the arena now; twice is harmless.

Views become stale: they show whatever the next owner writes.

Raises:
    RuntimeError: readers are alive.
)";

inline constexpr const char* kEngineDoc =
    R"(Reads and writes batches of segments over the members of a store, asynchronously.

Batches are split into requests of at most request_bytes that fit the device, of which queue_depth
are in flight per member. Short transfers are resumed at the next block, interruptions retried. Each
member has a thread and a ring of its own.

Args:
    fds: descriptors of the members; duplicated, so the caller may close its own.
    backend: "io_uring", "threads" (pread and pwrite on `threads` threads
        per member), or "auto": io_uring where
        the kernel offers it, else threads, with the reason in backend_reason.
    queue_depth: requests in flight per member, 1 to 1024; a quarter more (at least one) of urgent reads.
    request_bytes: largest request, a multiple of 4,096.
    regions: (address, nbytes) of memory to register with io_uring, each at most 1 GiB; what the
        kernel refuses to register is used unregistered, with the reason in registration_reason.

Raises:
    OSError: io_uring was asked for and is not available, or a descriptor is not open.

Threading: every method may be called from any thread; all release the GIL while they wait.
Lifetime: the memory of a segment must stay valid until its ticket is done; `keepalive` sees to it.
)";

inline constexpr const char* kSubmitDoc =
    R"(Starts a batch and returns its ticket, without waiting for I/O.

Args:
    segments: int64 of shape [n, 4]; each row is member, offset in it, address, nbytes.
    keepalive: kept until the batch has ended, also when the ticket is dropped.

Order is not defined, within a batch and between batches. Waits only for room when thousands of
segments are queued.
)";

inline constexpr const char* kSubmitReadDoc =
    R"(Starts a batch of reads and returns its ticket, without waiting for I/O.

Args:
    segments: int64 of shape [n, 4]; each row is member, offset in it, address, nbytes.
    keepalive: kept until the batch has ended, also when the ticket is dropped.
    urgent: a computation waits for this batch: it goes before everything queued that is not urgent.

Order is not defined, within a batch and between batches. Waits only for room when thousands of
segments are queued.
)";

inline constexpr const char* kStatisticsDoc =
    R"(Returns what each member has done since the engine was made, one dict per member.

read_latency, write_latency: how many requests took less than 2**k microseconds and not less than half
of that, for k = 0, 1, ...; the last counts all longer ones too.
queue_depth: requests in flight, on average over the time (busy_seconds) when any was; queue_depth_max.
request_bytes: the largest request here; device_command_bytes and device_segments: what the device
takes in one command (max_sectors_kb, max_segments), 0 when not known.
cancelled_bytes: of what close(cancel=True) dropped.

Threading: may be called at any time; numbers of one dict may be a moment apart.
)";

inline constexpr const char* kEngineCloseDoc =
    R"(Drains what is queued and in flight, and closes; raises as flush does.

Args:
    cancel: what is queued and has not begun fails with ECANCELED instead; its tickets raise it.
)";

inline constexpr const char* kFlushDoc =
    R"(Makes every completed write durable on all members (fdatasync).

Raises:
    OSError: a sync failed, or a write did whose ticket nobody has waited for.
)";

inline constexpr const char* kSpansDoc =
    R"(Returns when each member did its part, once the batch is done; before that an empty list.

One tuple per member that moved bytes: (member, "read" or "write", bytes, submitted, begun, ended). The
last three are nanoseconds of time.perf_counter_ns: the submission of the batch, the start of the
member's first request and the end of its last.
)";

inline constexpr const char* kWaitDoc = R"(Waits until every byte of the batch has moved.

Raises:
    OSError: the first failure, with errno, member, offset and path; at every call.
)";

inline constexpr const char* kFusedUpdateDoc =
    R"(One optimizer step over n elements, in place, in optax's order of operations, all in float32.

With g = grad * grad_scale and the direction u, param -= lr * (u + weight_decay * param):

    adam           mu = b1 * mu + (1 - b1) * g;  nu = b2 * nu + (1 - b2) * g**2
                   u = (mu / bias1) / (sqrt(nu / bias2 + eps_root) + eps)
    adam_nesterov  the same with b1 * (mu / bias1_next) + (1 - b1) * (g / bias1) above the line
    lion           u = sign(b1 * mu + (1 - b1) * g);  mu = b2 * mu + (1 - b2) * g
    momentum       mu = g + b1 * mu;  u = mu
    nesterov       mu = g + b1 * mu;  u = g + b1 * mu
    sgd            u = g

"roof" is no optimizer: it adds the gradient to param, mu and nu, with the loads and stores of adam,
to measure against.

Args:
    kernel: one of these names.
    param, mu, nu: addresses of float32 arrays, updated in place; 0 for moments a kernel has not.
    grad: address of the gradient, of type grad_dtype ("float32", "bfloat16", "float16").
    rounded: address where the new parameters go, rounded to rounded_dtype; 0 for none.
    bias1, bias1_next, bias2: 1 - b1**t, 1 - b1**(t + 1) and 1 - b2**t at step t = 1, 2, ...

bfloat16 is rounded to nearest with ties away from zero, float16 with ties to even. Denormals are
flushed to zero, as XLA does on CPU. The bits do not depend on threads or instruction set.
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101).
)";

inline constexpr const char* kCompactUpdateDoc =
    R"(One AdamW step over n elements whose state is kept in a compact format, in place.

The arithmetic is that of fused_update's adam, in float32, on what the state decodes to.

    state_format  param     residual                    mu, nu
    split         bfloat16  uint16, low half of master  float32
    split_bf16    bfloat16  uint16, low half of master  bfloat16
    bf16          bfloat16  none: param is the master   bfloat16
    int8          bfloat16  uint8, next byte of master  uint8, companded

Args:
    param, residual, mu, nu: addresses, updated in place.
    scales: int8 only: float32 pairs, mu's and nu's, for each block of BLOCK_ELEMENTS.
    first_element: position of the first element in the whole tensor.
    random_key: of seed, step and tensor; what is drawn for an element depends on it, on the
        element's position and on what is drawn.
    row_starts: int64 positions of rows that lie together in memory; then first_element is unused
        and the new moments of int8 are not to be kept.
    row_blocks: with rows of int8, pairs in scales for each row, from the block in which it begins.

Results do not depend on how a tensor is cut, on threads or on the instruction set.
)";

}  // namespace memascend::docs
