# SPDX-License-Identifier: Apache-2.0
"""How fast a member reads and writes, found out before it is formatted and without changing what is on it.

A block device gets back the very bytes that were just read from it; beside a file, a new one without a name is
written and read. So a create that is refused afterwards has changed nothing.
"""

from __future__ import annotations

import os
import stat
import statistics
import time
from pathlib import Path

import numpy as np

from memascend_jax.storage.device import Member
from memascend_jax.storage.engine import EngineFactory, Int64Array, address_of, aligned_buffer
from memascend_jax.storage.layout import MAX_BLOCK_BYTES
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.units import MIB

#: Enough for a few tenths of a second on one NVMe drive, all rounds together.
SAMPLE_BYTES = 64 * MIB
ROUNDS = 5


def measure_speed(member: Member, make_engine: EngineFactory) -> float:
    """Returns the bytes per second of ``member`` when as much is read as is written: the load of training.

    Raises:
        StoreError: the disk refuses a read or a write.
    """
    try:
        if member.is_block_device:
            nbytes = min(SAMPLE_BYTES, member.nbytes // 2 // MAX_BLOCK_BYTES * MAX_BLOCK_BYTES)
            offset = (member.nbytes - nbytes) // 2 // MAX_BLOCK_BYTES * MAX_BLOCK_BYTES
            return _timed(member.fd, offset, nbytes, make_engine)
        fd = _nameless_file(member)
        try:
            return _timed(fd, 0, SAMPLE_BYTES, make_engine)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreIOError.of(
            "measure the speed of", member.path, error, "check the disk, or give weights"
        ) from error


def _nameless_file(member: Member) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if member.direct else 0)
    path = Path(f"{member.path}.speed-{os.getpid()}")
    fd = os.open(path, flags, 0o600)
    path.unlink()
    return fd


def _timed(fd: int, offset: int, nbytes: int, make_engine: EngineFactory) -> float:
    memory = aligned_buffer(nbytes)
    segment: Int64Array = np.array([[0, offset, address_of(memory), nbytes]], np.int64)
    engine = make_engine([fd])
    try:
        if _is_new_file(fd):
            # Not zeros: a drive may take those without writing anything.
            memory[:] = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
            engine.submit_write(segment, memory).wait()
        else:
            engine.submit_read(segment, memory).wait()
        engine.flush()
        writing, reading = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            engine.submit_write(segment, memory).wait()
            engine.flush()
            wrote = time.perf_counter()
            engine.submit_read(segment, memory).wait()
            writing.append(wrote - began)
            reading.append(time.perf_counter() - wrote)
    finally:
        engine.close()
    return 2 * nbytes / (statistics.median(writing) + statistics.median(reading))


def _is_new_file(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0
