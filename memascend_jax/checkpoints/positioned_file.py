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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.errors import DataError
from memascend_jax.storage.engine import Engine, EngineTicket, ReusedBuffers, address_of, native_engine
from memascend_jax.units import round_up

#: What offsets, lengths and addresses of direct reads are multiples of; no disk asks for more.
_BLOCK = 4096
#: Bytes that are being read while a piece is in use, unless the caller says otherwise.
AHEAD_BYTES = 24 << 20
#: Less is read at once when it is asked for: it costs nothing, and needs no memory of its own.
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file to read; ``what`` names it in an error, ``tag`` tells the reader what it is."""

    file: PositionedFile
    offset: int
    nbytes: int
    what: str
    tag: Any = None


def cut(file: PositionedFile, offset: int, nbytes: int, step: int, what: str) -> Iterator[Piece]:
    """Yields ``nbytes`` from ``offset`` in pieces of ``step`` bytes."""
    for start in range(offset, offset + nbytes, step):
        yield Piece(file, start, min(step, offset + nbytes - start), what)


def read_ahead(
    pieces: Iterator[Piece], ahead_bytes: int = AHEAD_BYTES
) -> Iterator[tuple[Piece, NDArray[np.uint8]]]:
    """Yields ``pieces`` of any files with what is in them, each in an array of its own, in order.

    Args:
        ahead_bytes: what is being read while one is in use; at least one piece.
    """
    buffers = ReusedBuffers(32)
    flying: deque[tuple[Piece, NDArray[np.uint8], EngineTicket | None]] = deque()
    n_bytes, more = 0, True
    try:
        while True:
            while more and (not flying or n_bytes < ahead_bytes):
                piece = next(pieces, None)
                if piece is None:
                    more = False
                    break
                flying.append((piece, *piece.file.begin(piece, buffers)))
                n_bytes += piece.nbytes
            if not flying:
                return
            piece, values, ticket = flying.popleft()
            n_bytes -= piece.nbytes
            if ticket is not None:
                piece.file.finish(ticket, piece.what)
            yield piece, values
            del values
    finally:
        for _, _, ticket in flying:
            if ticket is not None:
                # What failed is told by the first that did.
                with suppress(OSError):
                    ticket.wait()


class PositionedFile:
    """An open file of known size. Reads beyond it, or short reads, raise ``DataError`` naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._direct_fd = -1
        self._engine: Engine | None = None

    def read(self, offset: int, nbytes: int, what: str) -> bytearray:
        """Returns ``nbytes`` bytes from ``offset``; ``what`` names them in an error."""
        self._check_inside(offset, nbytes, what)
        buffer = bytearray(nbytes)
        self._fill(memoryview(buffer), offset, what)
        return buffer

    def stream(self, offset: int, nbytes: int, step: int, what: str) -> Iterator[NDArray[np.uint8]]:
        """Yields ``nbytes`` bytes from ``offset`` in arrays of ``step``, each new; the next are being read."""
        for _, piece in read_ahead(iter(cut(self, offset, nbytes, step, what))):
            yield piece

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for descriptor in (self._fd, self._direct_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._direct_fd = -1

    def begin(self, piece: Piece, buffers: ReusedBuffers) -> tuple[NDArray[np.uint8], EngineTicket | None]:
        """Starts reading ``piece`` and returns where it will be, and what to ``finish`` first if anything."""
        self._check_inside(piece.offset, piece.nbytes, piece.what)
        engine = self._direct_engine() if piece.nbytes > _SMALL_BYTES else None
        if engine is None:
            read = np.frombuffer(self.read(piece.offset, piece.nbytes, piece.what), np.uint8)
            # It has been read; what is kept of it would push out what is read again.
            os.posix_fadvise(self._fd, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)
            return read, None
        lead, end = piece.offset % _BLOCK, piece.offset + piece.nbytes
        first = piece.offset - lead
        memory = buffers.take(round_up(end - first, _BLOCK))
        # The file's last, partial block cannot be read directly.
        whole = min(round_up(end, _BLOCK), self.size // _BLOCK * _BLOCK)
        if whole < end:
            self._fill(memory[whole - first : end - first].data, whole, piece.what)
        segment = np.array([[0, first, address_of(memory), whole - first]], np.int64)
        return memory[lead : lead + piece.nbytes], engine.submit_read(segment, memory)

    def finish(self, ticket: EngineTicket, what: str) -> None:
        """Waits for what ``begin`` has started."""
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
