# SPDX-License-Identifier: Apache-2.0
"""The chunk files of a checkpoint's arrays: written and read in pieces, past the page cache, with their checksums.

Nothing is held but the caller's memory: a piece goes to its place in the file as it comes. Direct I/O moves what is
aligned in memory and in the file; the rest, a few bytes at the end of a chunk, goes the ordinary way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.checkpoints.array_layout import TRAILER_BYTES, ArrayLayout, ChunkSpan
from memascend_jax.errors import DataError
from memascend_jax.optim.state_format import BLOCK_BYTES

Bytes = NDArray[np.uint8]
_ZEROS = np.zeros(1 << 16, np.uint8)


class ArrayWriter:
    """Writes one array from its first element to its last.

    Threading: ``write`` belongs to one thread, the writing happens on ``executor``.
    """

    def __init__(self, folder: Path, layout: ArrayLayout, executor: Executor) -> None:
        self._folder = folder
        self._layout = layout
        self._executor = executor
        self._next = 0
        self._chunk: _ChunkFile | None = None
        self._chunks: list[_ChunkFile] = []

    def write(self, start: int, values: NDArray[Any]) -> list[Future[None]]:
        """Starts writing the flat ``values`` from element ``start`` on, where the last call ended.

        Their memory must stay as it is until the futures are done, which raise ``OSError`` with the path.
        """
        if start != self._next:
            raise ValueError(f"array {self._layout.key}: expected element {self._next:,} next, got {start:,}")
        self._next += values.size
        raw = values.view(np.uint8)
        futures = []
        for span in self._layout.spans(start, values.size):
            if span.offset == 0:
                self._chunk = _ChunkFile(self._folder, self._layout, span.chunk)
                self._chunks.append(self._chunk)
            assert self._chunk is not None, "elements come in order"
            piece = raw[span.skip : span.skip + span.nbytes]
            self._chunk.add_to_checksum(piece)
            futures.append(self._executor.submit(self._chunk.write, piece, span.offset))
        return futures

    def digests(self) -> dict[str, int]:
        """Returns the CRC32C that ends each chunk's file, by its path within the array's folder; all are written."""
        return {self._layout.chunk_file(number): chunk.crc for number, chunk in enumerate(self._chunks)}

    def abandon(self) -> None:
        """Closes what is open after a failure."""
        if self._chunk is not None:
            self._chunk.close()


class _ChunkFile:
    """A chunk's file while it is written; closes itself with its last byte."""

    def __init__(self, folder: Path, layout: ArrayLayout, chunk: int) -> None:
        self._path = folder / layout.chunk_file(chunk)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._data_bytes = layout.chunk_data_bytes(chunk)
        self._chunk_bytes = layout.chunk_bytes
        self._crc = 0
        #: Of the whole chunk, once it is written.
        self.crc = 0
        self._lock = threading.Lock()
        self._left = self._data_bytes
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._plain: int | None = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.posix_fallocate(self._plain, 0, self._chunk_bytes + TRAILER_BYTES)
            self._direct = open_direct(self._path, flags)
        except OSError as error:
            os.close(self._plain)
            raise _named(error, "write", self._path) from error

    def add_to_checksum(self, piece: Bytes) -> None:
        """Takes the next bytes in order, before they are written."""
        self._crc = _core.crc32c(piece.ctypes.data, piece.size, self._crc)

    def write(self, piece: Bytes, offset: int) -> None:
        if self._plain is None:
            return
        try:
            aligned = _aligned_bytes(piece, offset) if self._direct is not None else 0
            if aligned:
                assert self._direct is not None
                _write_all(self._direct, piece[:aligned], offset)
            _write_all(self._plain, piece[aligned:], offset + aligned)
            with self._lock:
                self._left -= piece.size
                last = self._left == 0
            if last:
                self._finish()
        except OSError as error:
            raise _named(error, "write", self._path) from error

    def _finish(self) -> None:
        assert self._plain is not None
        crc = self.crc = padded_crc(self._crc, self._chunk_bytes - self._data_bytes)
        _write_all(
            self._plain, np.frombuffer(crc.to_bytes(TRAILER_BYTES, "little"), np.uint8), self._chunk_bytes
        )
        self.close()

    def close(self) -> None:
        with self._lock:
            plain, self._plain = self._plain, None
            direct, self._direct = self._direct, None
        for descriptor in (plain, direct):
            if descriptor is not None:
                os.close(descriptor)


class ArrayReader:
    """Reads one array, and compares the checksum of each chunk whose bytes were all seen in order."""

    def __init__(self, folder: Path, layout: ArrayLayout, digests: Mapping[str, int] | None = None) -> None:
        """Args: ``digests``, as ``ArrayWriter`` returns them, with which the files were saved; None: not known."""
        self.layout = layout
        self._folder = folder
        self._digests = digests
        self._crc = 0
        self._next = 0

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fills the flat ``out`` with the elements from ``start`` on; ``check`` compares them afterwards.

        Threading: any.

        Raises:
            DataError: a file is missing or too short.
            OSError: the disk failed; with the path.
        """
        raw = out.view(np.uint8)
        for span in self.layout.spans(start, out.size):
            self._read_span(span, raw[span.skip : span.skip + span.nbytes])

    def check(self, start: int, values: NDArray[Any]) -> None:
        """Takes what was read into account; raises ``DataError`` when a chunk ends and does not match its checksum.

        Called in order from element 0 on, by one thread; elements out of order are not compared.
        """
        raw = values.view(np.uint8)
        for span in self.layout.spans(start, values.size):
            at = span.chunk * self.layout.chunk_bytes + span.offset
            if span.offset == 0:
                self._crc, self._next = 0, at
            if at != self._next:
                continue
            piece = raw[span.skip : span.skip + span.nbytes]
            self._crc = _core.crc32c(piece.ctypes.data, piece.size, self._crc)
            self._next += span.nbytes
            if span.offset + span.nbytes == self.layout.chunk_data_bytes(span.chunk):
                self._compare(span.chunk)

    def _compare(self, chunk: int) -> None:
        layout = self.layout
        found = padded_crc(self._crc, layout.chunk_bytes - layout.chunk_data_bytes(chunk))
        trailer = np.empty(TRAILER_BYTES, np.uint8)
        self._read_span(ChunkSpan(chunk, layout.chunk_bytes, TRAILER_BYTES, 0), trailer)
        kept = int.from_bytes(trailer.tobytes(), "little")
        if found != kept:
            raise DataError(
                f"the checkpoint's file '{self._path(chunk)}' is damaged: the CRC32C of its contents is {found:08x}, "
                f"but {kept:08x} was written with them; move this step away to use an older one"
            )
        saved = kept if self._digests is None else self._digests.get(layout.chunk_file(chunk))
        if saved != kept:
            was = "none" if saved is None else f"{saved:08x}"
            raise DataError(
                f"the checkpoint's file '{self._path(chunk)}' is whole, but not the one that was saved there: its "
                f"CRC32C is {kept:08x}, that of the one that was saved {was}; move this step away to use an older one"
            )

    def _read_span(self, span: ChunkSpan, out: Bytes) -> None:
        path = self._path(span.chunk)
        try:
            aligned = _aligned_bytes(out, span.offset)
            direct = open_direct(path, os.O_RDONLY | os.O_CLOEXEC) if aligned else None
            if direct is None:
                aligned = 0
            else:
                try:
                    _read_all(direct, out[:aligned], span.offset, path)
                finally:
                    os.close(direct)
            if aligned < out.size:
                plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _read_all(plain, out[aligned:], span.offset + aligned, path)
                    os.posix_fadvise(plain, span.offset, span.nbytes, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(plain)
        except FileNotFoundError:
            raise DataError(
                f"the checkpoint is not whole: '{path}' is missing; move this step away to use an older one"
            ) from None
        except OSError as error:
            raise _named(error, "read", path) from error

    def _path(self, chunk: int) -> Path:
        return self._folder / self.layout.chunk_file(chunk)


def open_direct(path: Path, flags: int) -> int | None:
    """Returns a descriptor past the page cache, or None where the file system has no such thing."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def padded_crc(crc: int, zeros: int) -> int:
    """Returns ``crc`` continued over ``zeros`` bytes of zero."""
    while zeros:
        n = min(zeros, _ZEROS.size)
        crc = _core.crc32c(_ZEROS.ctypes.data, n, crc)
        zeros -= n
    return crc


def sync_disk(folder: Path) -> None:
    """Makes everything on the disk of ``folder`` durable, names too.

    One call for thousands of files and folders: a flush for each of them takes seconds for the smallest model.

    Raises:
        OSError: the disk failed, or did so since the last call.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc().syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise _named(OSError(code, os.strerror(code)), "write", folder)
    finally:
        os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _aligned_bytes(piece: Bytes, offset: int) -> int:
    """How many of the first bytes can go past the page cache."""
    if offset % BLOCK_BYTES or piece.ctypes.data % BLOCK_BYTES:
        return 0
    return piece.size // BLOCK_BYTES * BLOCK_BYTES


def _write_all(descriptor: int, piece: Bytes, offset: int) -> None:
    view = piece.data
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read_all(descriptor: int, out: Bytes, offset: int, path: Path) -> None:
    view = out.data
    while view:
        n = os.preadv(descriptor, [view], offset)
        if n == 0:
            size = os.fstat(descriptor).st_size
            raise DataError(
                f"the checkpoint is not whole: '{path}' has {size:,} bytes, fewer than it should; move this step "
                "away to use an older one"
            )
        view, offset = view[n:], offset + n


def _named(error: OSError, action: str, path: Path) -> OSError:
    return OSError(error.errno, f"cannot {action} the checkpoint: {error.strerror}", str(path))
