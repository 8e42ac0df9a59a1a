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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.storage.device import DirectIo, Member, create_member, open_member
from memascend_jax.storage.engine import EngineFactory, Int64Array, address_of
from memascend_jax.storage.layout import MAX_BLOCK_BYTES
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.units import MIB

#: Enough for a few tenths of a second on one NVMe drive, all rounds together.
SAMPLE_BYTES = 64 * MIB
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of a member, a flush included in the writing."""

    read: float
    write: float

    @property
    def both(self) -> float:
        """Bytes per second when as much is read as is written: the load of training."""
        return 2 / (1 / self.read + 1 / self.write)


def measure_speed(member: Member, make_engine: EngineFactory) -> float:
    """Returns the bytes per second of ``member`` when as much is read as is written.

    Raises:
        StoreError: the disk refuses a read or a write.
    """
    return measure_rates(member, make_engine).both


def probe_path(path: str, direct_io: DirectIo, make_engine: EngineFactory) -> Rates:
    """Returns how fast a member at ``path``, which need not exist yet, would read and write; leaves nothing behind.

    Raises:
        StoreError: the path is in use or cannot hold a store, or the disk refuses a read or a write.
    """
    if Path(path).exists() and not Path(path).is_dir():
        member = open_member(path, read_only=False, direct_io=direct_io)
    else:
        draft = _existing_folder(Path(path)) / f"memascend-probe-{os.getpid()}"
        member = create_member(str(draft), direct_io=direct_io)
        draft.unlink()
    try:
        return measure_rates(member, make_engine)
    finally:
        member.close()


def _existing_folder(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def measure_rates(member: Member, make_engine: EngineFactory) -> Rates:
    """Returns how fast ``member`` reads and writes, each alone.

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


def _timed(fd: int, offset: int, nbytes: int, make_engine: EngineFactory) -> Rates:
    # The arena's memory, because its huge pages are half of the speed.
    arena = PinnedArena(nbytes, pin="none")
    slot = arena.allocate(nbytes, label="speed")
    try:
        return _timed_with(slot.view(0, nbytes), fd, offset, make_engine)
    finally:
        slot.release()
        arena.close()


def _timed_with(memory: npt.NDArray[np.uint8], fd: int, offset: int, make_engine: EngineFactory) -> Rates:
    nbytes = memory.nbytes
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
    return Rates(nbytes / statistics.median(reading), nbytes / statistics.median(writing))


def _is_new_file(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0
