# SPDX-License-Identifier: Apache-2.0
"""A large new file written once from beginning to end, past the page cache where the file system can do that.

What goes through the page cache waits there, up to a large part of all memory, and counts as a memory cgroup's until
it is on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.storage.engine import EngineTicket, address_of, aligned_buffer, native_engine
from memascend_jax.storage.filesystem import reserve
from memascend_jax.units import round_up

_BLOCK = 4096
_PIECE_BYTES = 8 << 20
#: Through the page cache: so much at most waits to be written.
_UNSYNCED_BYTES = 32 << 20


class StreamFile:
    """A new file of ``nbytes`` that is filled by ``write``; leaving the block well puts it on disk.

    Its space is reserved first. A failure names the path.

    Threading: one thread. Lifetime: what is given to ``write`` is copied.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        self._written = self._filled = 0
        self._turn = 0
        try:
            self._fd, self._direct = _create(path)
            try:
                reserve(self._fd, round_up(max(nbytes, 1), _BLOCK))
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise self._explained(error) from error
        size = min(_PIECE_BYTES, round_up(max(nbytes, 1), _BLOCK))
        self._halves = [aligned_buffer(size), aligned_buffer(size)]
        self._flying: list[EngineTicket | None] = [None, None]
        self._engine = native_engine([self._fd], request_bytes=2 << 20) if self._direct else None

    def write(self, data: NDArray[Any] | bytes) -> None:
        """Appends ``data``."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        while raw.size:
            half = self._halves[self._turn]
            count = min(raw.size, half.size - self._filled)
            half[self._filled : self._filled + count] = raw[:count]
            self._filled += count
            raw = raw[count:]
            if self._filled == half.size:
                self._submit()

    def __enter__(self) -> StreamFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._engine is not None:
                self._engine.close()
            os.close(self._fd)

    def _submit(self) -> None:
        """Starts writing what is gathered, in whole blocks, and turns to the other half when that has been written."""
        half, offset, count = self._halves[self._turn], self._written, self._filled
        try:
            if self._engine is None:
                self._write_buffered(half[:count], offset)
            else:
                half[count : round_up(count, _BLOCK)] = 0
                segment = np.array([[0, offset, address_of(half), round_up(count, _BLOCK)]], np.int64)
                self._flying[self._turn] = self._engine.submit_write(segment, half)
            self._turn = 1 - self._turn
            self._wait(self._turn)
        except OSError as error:
            raise self._explained(error) from error
        self._written, self._filled = offset + count, 0

    def _write_buffered(self, data: NDArray[np.uint8], offset: int) -> None:
        done = 0
        while done < data.size:
            done += os.pwrite(self._fd, data[done:].data, offset + done)
        if (offset + done) // _UNSYNCED_BYTES > offset // _UNSYNCED_BYTES:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, offset + done, os.POSIX_FADV_DONTNEED)

    def _wait(self, turn: int) -> None:
        ticket, self._flying[turn] = self._flying[turn], None
        if ticket is not None:
            ticket.wait()

    def _finish(self) -> None:
        if self._filled:
            self._submit()
        try:
            for turn in (0, 1):
                self._wait(turn)
            os.ftruncate(self._fd, self._written)
            os.fsync(self._fd)
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> OSError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return OSError(error.errno, f"cannot write the export: {reason}", str(self._path))


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError:
        # Some kernels make the file before they find that it cannot be opened so.
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o666), False
