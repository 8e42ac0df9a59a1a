# SPDX-License-Identifier: Apache-2.0
"""Reads of given ranges of a file. Nothing is mapped: mapped pages would count as resident memory."""

from __future__ import annotations

import os
from pathlib import Path

from memascend_jax.errors import DataError


class PositionedFile:
    """An open file of known size. Reads beyond it, or short reads, raise ``DataError`` naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int, what: str) -> bytearray:
        """Returns ``nbytes`` bytes from ``offset``; ``what`` names them in an error."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DataError(
                f"cannot read {what} (offset {offset:,}, {nbytes:,} bytes) from '{self.path}': the file has "
                f"{self.size:,} bytes. It is truncated or damaged: fetch it again."
            )
        buffer = bytearray(nbytes)
        view, done = memoryview(buffer), 0
        while done < nbytes:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise DataError(
                    f"cannot read {what} from '{self.path}': the file became shorter while it was read"
                )
            done += got
        return buffer

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
