# SPDX-License-Identifier: Apache-2.0
"""A file of plain text as a source: one document, read in pieces that end at an empty line, a line, or a character.

The tokens of a piece are made without the next one; what a long document is cut into ends in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from memascend_jax.data.file_bytes import AnyBytes, OfFile
from memascend_jax.data.records import Example
from memascend_jax.data.source import Block, Fault
from memascend_jax.errors import DataError
from memascend_jax.units import KIB

#: Small, so that a part of one book can be held out.
_PIECE_BYTES = 64 * KIB
#: How far behind its border a piece may end.
_SLACK_BYTES = 4 * KIB


class PlainText(OfFile):
    """A file whose text is trained as it is."""

    form = "plain text"

    def __init__(self, content: AnyBytes) -> None:
        self.content = content
        self.name = content.shown
        pieces = -(-content.size // _PIECE_BYTES)
        self._sizes = np.full(pieces, _PIECE_BYTES, np.int64)
        if pieces:
            self._sizes[-1] = content.size - (pieces - 1) * _PIECE_BYTES

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self._sizes

    def load(self, block: int) -> Block:
        """Returns a piece, which is one example; an empty one is none."""
        start, end = self._border(block), self._border(block + 1)
        data = self.content.read(start, end - start)
        # Whether a piece begins or ends its document decides its tokens too.
        digest = hashlib.blake2b(data, digest_size=32, person=b"text")
        digest.update(f"{start == 0}{end == self.content.size}".encode())
        return Block(digest.digest(), partial(self._items, start, data))

    def _border(self, block: int) -> int:
        """Where a piece begins: behind the first empty line after its place, else a line, else at a character."""
        at = block * _PIECE_BYTES
        if at == 0 or at >= self.content.size:
            return min(at, self.content.size)
        data = self.content.read(at, _SLACK_BYTES)
        for end in (b"\n\n", b"\n"):
            found = data.find(end)
            if found >= 0:
                return at + found + len(end)
        # The bytes within a character in UTF-8 are 10xxxxxx.
        return at + next((index for index in range(min(4, len(data))) if data[index] & 0xC0 != 0x80), 0)

    def _items(self, start: int, data: bytes, kind: str) -> Iterator[Example | Fault]:
        if kind not in ("auto", "text"):
            raise DataError(
                f"the data file '{self.name}' is plain text, which has no records of data.kind={kind}; set "
                "data.kind=auto, or give a file that has"
            )
        try:
            text = data.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            yield Fault(
                self.name,
                f"not UTF-8 text (byte 0x{data[error.start]:02X} at byte {start + error.start:,} of the file). If it "
                "is Latin-1, write it anew: iconv -f latin1 -t utf-8 OLD > NEW",
            )
            return
        if text.strip():
            ends = start + len(data) == self.content.size
            yield Example(f"{self.name} at byte {start:,}", text=text, begins=start == 0, ends=ends)
