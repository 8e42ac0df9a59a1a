# SPDX-License-Identifier: Apache-2.0
"""A disk that forgets: an engine over ordinary files that logs what was not flushed and fails on command.

Crash model: of the writes since the last flush any subset persists, each torn at 512 bytes. Flushes are the only
order. ``crash_at`` picks an I/O boundary (a write request or a flush, counted from 0): the request is issued, as far
as the disk knows, and the program gets no further.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SECTOR = 512


class CrashError(BaseException):
    """The machine stops here. Not an ``Exception``: nothing may handle it."""


@dataclass(frozen=True)
class Sector:
    """What one sector would become if its write persists."""

    path: str
    offset: int
    data: bytes


class SimulatedDisk:
    """The state of the members behind all engines built by ``engine``. Reads see every write at once."""

    def __init__(self) -> None:
        self.crash_at: int | None = None
        #: Raises ``OSError`` instead of doing the request: (kind, path, offset) -> errno or 0.
        self.refuse: Callable[[str, str, int], int] = lambda kind, path, offset: 0
        self.boundaries = 0
        self.trace: list[str] = []
        self._durable: dict[str, bytearray] = {}
        self._unflushed: list[Sector] = []
        self._lengths: dict[str, int] = {}
        #: A store is written by several threads, and flushed by one of them.
        self._lock = threading.Lock()

    def engine(self, fds: Sequence[int]) -> SimulatedEngine:
        return SimulatedEngine(self, fds)

    def boundary(self, kind: str) -> None:
        self.trace.append(kind)
        self.boundaries += 1
        if self.crash_at is not None and self.boundaries > self.crash_at:
            raise CrashError

    def attach(self, path: str) -> None:
        if path not in self._durable:
            self._durable[path] = bytearray(Path(path).read_bytes())

    def wrote(self, path: str, offset: int, data: bytes) -> None:
        pieces = [
            Sector(path, offset + begin, data[begin : begin + SECTOR])
            for begin in range(0, len(data), SECTOR)
        ]
        with self._lock:
            self._unflushed += pieces

    def flushed(self) -> None:
        with self._lock:
            self._apply(self._unflushed)
            self._unflushed = []

    @property
    def unflushed(self) -> int:
        return len(self._unflushed)

    def crash_states(self, limit: int, rng: np.random.Generator) -> Iterator[list[Sector]]:
        """Yields sets of sectors that persisted: all subsets when there are at most ``limit``, else random ones.

        The sampled ones include nothing, everything, each write prefix and each suffix.
        """
        # Lengths are the file system's affair: its journal keeps them.
        self._lengths = {path: Path(path).stat().st_size for path in self._durable}
        sectors = self._unflushed
        if 2 ** len(sectors) <= limit:
            for keep in itertools.product([False, True], repeat=len(sectors)):
                yield [sector for sector, kept in zip(sectors, keep, strict=True) if kept]
            return
        yield []
        yield sectors
        cuts = rng.choice(len(sectors), size=min(len(sectors), limit // 4), replace=False)
        for cut in cuts:
            yield sectors[:cut]
            yield sectors[cut:]
        for _ in range(limit - 2 - 2 * len(cuts)):
            kept = rng.random(len(sectors)) < rng.choice([0.1, 0.5, 0.9])
            yield [sector for sector, keep in zip(sectors, kept, strict=True) if keep]

    def restart(self, persisted: Sequence[Sector]) -> None:
        """Makes the files what a reboot finds: what was flushed, and ``persisted``."""
        images = {path: bytearray(image) for path, image in self._durable.items()}
        for sector in persisted:
            _store(images[sector.path], sector)
        for path, image in images.items():
            Path(path).write_bytes(image.ljust(self._lengths.get(path, 0), b"\0"))

    def forget(self) -> None:
        """Starts over from the files as they are."""
        self._durable = {}
        self._unflushed = []
        self.crash_at = None
        self.boundaries = 0
        self.trace = []

    def _apply(self, sectors: Sequence[Sector]) -> None:
        for sector in sectors:
            _store(self._durable[sector.path], sector)


def _store(image: bytearray, sector: Sector) -> None:
    end = sector.offset + len(sector.data)
    image.extend(bytes(max(end - len(image), 0)))
    image[sector.offset : end] = sector.data


class DoneTicket:
    """I/O that has ended, with the error it ended in."""

    def __init__(self, error: OSError | None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class SimulatedEngine:
    """The store's engine interface over ``SimulatedDisk``; everything happens at once."""

    backend = "simulated"
    backend_reason = ""

    def __init__(self, disk: SimulatedDisk, fds: Sequence[int]) -> None:
        self._disk = disk
        self.urgent_reads = 0
        self._fds = [os.dup(fd) for fd in fds]
        self._paths = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds]
        self._counts = dict.fromkeys(("read_bytes", "write_bytes", "read_requests", "write_requests"), 0)
        for path in self._paths:
            disk.attach(path)

    def submit_read(self, segments: np.ndarray, keepalive: object = None, urgent: bool = False) -> DoneTicket:
        self.urgent_reads += urgent
        for member, offset, address, nbytes in segments.tolist():
            error = self._refused("read", member, offset, nbytes)
            if error is not None:
                return DoneTicket(error)
            data = os.pread(self._fds[member], nbytes, offset)
            if len(data) != nbytes:
                text = f"cannot read {nbytes:,} bytes at offset {offset:,} of member {member}: the file ends"
                return DoneTicket(OSError(errno.EIO, text, self._paths[member]))
            ctypes.memmove(address, data, nbytes)
            self._count("read", nbytes)
        return DoneTicket(None)

    def submit_write(self, segments: np.ndarray, keepalive: object = None) -> DoneTicket:
        failure: OSError | None = None
        for member, offset, address, nbytes in segments.tolist():
            error = self._refused("write", member, offset, nbytes)
            if error is not None:
                failure = failure or error
                continue
            data = ctypes.string_at(address, nbytes)
            self._disk.wrote(self._paths[member], offset, data)
            os.pwrite(self._fds[member], data, offset)
            self._count("write", nbytes)
            self._disk.boundary("write")
        return DoneTicket(failure)

    def flush(self) -> None:
        error = self._refused("flush", 0, 0, 0)
        if error is not None:
            raise error
        self._disk.boundary("flush")
        self._disk.flushed()

    def counters(self) -> dict[str, Any]:
        return dict(self._counts)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _refused(self, kind: str, member: int, offset: int, nbytes: int) -> OSError | None:
        code = self._disk.refuse(kind, self._paths[member], offset)
        if not code:
            return None
        text = f"cannot {kind} {nbytes:,} bytes at offset {offset:,} of member {member}: {os.strerror(code)}"
        return OSError(code, text, self._paths[member])

    def _count(self, kind: str, nbytes: int) -> None:
        self._counts[f"{kind}_bytes"] += nbytes
        self._counts[f"{kind}_requests"] += 1
