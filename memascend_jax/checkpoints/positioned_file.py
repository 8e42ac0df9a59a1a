# SPDX-License-Identifier: Apache-2.0
"""Reads of given ranges of a file. Nothing is mapped: mapped pages would count as resident memory.

Long ranges are read past the page cache where the file system can do that: a model that is read once would push
everything else out of it, and in a memory cgroup it counts as the group's memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memascend_jax.errors import DataError
from memascend_jax.storage.engine import Engine, EngineTicket, ReusedBuffers, address_of, native_engine
from memascend_jax.units import round_up

#: What offsets, lengths and addresses of direct reads are multiples of; no disk asks for more.
_BLOCK = 4096
#: Pieces that are being read while one is in use.
_AHEAD = 3


class PositionedFile:
    """An open file of known size. Reads beyond it, or short reads, raise ``DataError`` naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._direct_fd = -1
        self._engine: Engine | None = None
        self._buffers = ReusedBuffers()

    def read(self, offset: int, nbytes: int, what: str) -> bytearray:
        """Returns ``nbytes`` bytes from ``offset``; ``what`` names them in an error."""
        self._check_inside(offset, nbytes, what)
        buffer = bytearray(nbytes)
        self._fill(memoryview(buffer), offset, what)
        return buffer

    def stream(self, offset: int, nbytes: int, step: int, what: str) -> Iterator[NDArray[np.uint8]]:
        """Yields ``nbytes`` bytes from ``offset`` in arrays of ``step``, each new; the next are being read."""
        self._check_inside(offset, nbytes, what)
        engine = self._direct_engine()
        if engine is None:
            for start in range(offset, offset + nbytes, step):
                count = min(step, offset + nbytes - start)
                yield np.frombuffer(self.read(start, count, what), np.uint8)
                # It has been read; what is kept of it would push out what is read again.
                os.posix_fadvise(self._fd, start, count, os.POSIX_FADV_DONTNEED)
            return
        starts = iter(range(offset, offset + nbytes, step))
        flying: deque[tuple[int, NDArray[np.uint8], EngineTicket | None]] = deque()
        try:
            while True:
                while len(flying) <= _AHEAD and (following := next(starts, None)) is not None:
                    count = min(step, offset + nbytes - following)
                    flying.append((following, *self._begin(engine, following, count, what)))
                if not flying:
                    return
                start, memory, ticket = flying.popleft()
                if ticket is not None:
                    self._finish(ticket, what)
                lead = start % _BLOCK
                yield memory[lead : lead + min(step, offset + nbytes - start)]
        finally:
            for _, _, ticket in flying:
                if ticket is not None:
                    # What failed is told by the first that did.
                    with suppress(OSError):
                        ticket.wait()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for descriptor in (self._fd, self._direct_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._direct_fd = -1

    def _begin(
        self, engine: Engine, start: int, count: int, what: str
    ) -> tuple[NDArray[np.uint8], EngineTicket | None]:
        """Starts reading the blocks that hold ``count`` bytes from ``start``; the file's last, partial one is read."""
        first, end = start // _BLOCK * _BLOCK, start + count
        memory = self._buffers.take(round_up(end - first, _BLOCK))
        whole = min(round_up(end, _BLOCK), self.size // _BLOCK * _BLOCK)
        if whole < end:
            tail = max(whole, first)
            self._fill(memory[tail - first : end - first].data, tail, what)
        if whole <= first:
            return memory, None
        segment = np.array([[0, first, address_of(memory), whole - first]], np.int64)
        return memory, engine.submit_read(segment, memory)

    def _finish(self, ticket: EngineTicket, what: str) -> None:
        try:
            ticket.wait()
        except OSError as error:
            if os.fstat(self._fd).st_size < self.size:
                raise self._shrunk(what) from error
            raise OSError(
                error.errno, f"cannot read {what}: {os.strerror(error.errno or 0)}", str(self.path)
            ) from error

    def _fill(self, view: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise self._shrunk(what)
            done += got

    def _check_inside(self, offset: int, nbytes: int, what: str) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DataError(
                f"cannot read {what} (offset {offset:,}, {nbytes:,} bytes) from '{self.path}': the file has "
                f"{self.size:,} bytes. It is truncated or damaged: fetch it again."
            )

    def _shrunk(self, what: str) -> DataError:
        return DataError(f"cannot read {what} from '{self.path}': the file became shorter while it was read")

    def _direct_engine(self) -> Engine | None:
        """Returns what reads past the page cache, or None where the file system cannot do that."""
        if self._engine is None and self._direct_fd == -1:
            try:
                self._direct_fd = os.open(
                    f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                )
            except OSError:
                self._direct_fd = -2
                return None
            self._engine = native_engine([self._direct_fd])
        return self._engine
