# SPDX-License-Identifier: Apache-2.0
"""The bytes of a data file, read at any place; mapped pages would count as resident memory, so nothing is mapped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from memascend_jax.errors import DataError
from memascend_jax.units import MIB

_SAMPLE_BYTES = 4096
_SAMPLES = 256
#: Files up to this size are compared by all of their bytes.
_WHOLE_BYTES = 4 * MIB


class FileBytes:
    """An open data file.

    Args:
        path: the file.
        shown: what messages call it; the file that it was unpacked from, for example.
        key: the configuration's key that names it.

    Raises:
        DataError: it is not there, no file, or cannot be read.
    """

    def __init__(self, path: Path, shown: str | None = None, key: str = "data.source") -> None:
        self.path, self.shown, self.key = path, shown or str(path), key
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        self._stat = os.fstat(self._fd)
        self.size = self._stat.st_size

    def read(self, offset: int, count: int) -> bytes:
        """Returns ``count`` bytes from ``offset``, fewer at the end of the file.

        Raises:
            DataError: the disk fails.
        """
        pieces = []
        count = max(0, min(count, self.size - offset))
        while count:
            try:
                piece = os.pread(self._fd, count, offset)
            except OSError as error:
                raise self._unreadable(error) from error
            if not piece:
                raise self.changed(f"it ends at byte {offset:,} now, and had {self.size:,} bytes")
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fingerprint(self) -> str:
        """Returns a SHA-256, in hex, of the size and of the contents: of all of a small file, of samples of a large."""
        digest = hashlib.sha256(f"{self.size};".encode())
        if self.size <= _WHOLE_BYTES:
            digest.update(self.read(0, self.size))
            return digest.hexdigest()
        for index in range(_SAMPLES):
            digest.update(self.read((self.size - _SAMPLE_BYTES) * index // (_SAMPLES - 1), _SAMPLE_BYTES))
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Returns when nobody has written to the file since it was opened.

        Raises:
            DataError: somebody has, or another file has taken its place.
        """
        now, was = os.fstat(self._fd), self._stat
        if (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns):
            raise self.changed(f"it has {now.st_size:,} bytes now, and had {was.st_size:,}")

    def changed(self, how: str) -> DataError:
        """Returns the error of a file that changes while it is read."""
        return DataError(
            f"the data file '{self.shown}' was changed while it was read: {how}. The last committed step is kept; put "
            "the file back as it was and start again, or begin a new run with the new file"
        )

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close() if hasattr(self, "_fd") else None

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot read the data file '{self.shown}': {error.strerror}; set {self.key}")


class MemoryBytes:
    """Bytes in memory, as those of a file; ``shown`` as for ``FileBytes``."""

    def __init__(self, content: bytes, shown: str) -> None:
        self.content, self.shown, self.size = content, shown, len(content)

    def read(self, offset: int, count: int) -> bytes:
        """Returns ``count`` bytes from ``offset``, fewer at the end."""
        return self.content[offset : offset + count]

    def fingerprint(self) -> str:
        """Returns a SHA-256, in hex, of the bytes."""
        return hashlib.sha256(f"{self.size};".encode() + self.content).hexdigest()

    def check_unchanged(self) -> None:
        """Returns: nobody else has these bytes."""

    def close(self) -> None:
        """Does nothing."""


AnyBytes = FileBytes | MemoryBytes


class OfFile:
    """The part of a source that is its file's."""

    content: AnyBytes

    def fingerprint(self) -> str:
        """Returns the file's."""
        return self.content.fingerprint()

    def check_unchanged(self) -> None:
        """Raises ``DataError`` when the file is changed."""
        self.content.check_unchanged()

    def close(self) -> None:
        """Closes the file."""
        self.content.close()
