# SPDX-License-Identifier: Apache-2.0
"""Lines of JSON as a source: a block is the lines that begin in a piece of the file.

So a block is found without reading what is before it, and every line belongs to exactly one. Line numbers are known
when the blocks are read in order; else they are counted, for messages only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.data.file_bytes import AnyBytes, OfFile
from memascend_jax.data.records import EXPECTED, Example, example_of
from memascend_jax.data.source import BLOCK_BYTES, Block, Fault
from memascend_jax.errors import DataError
from memascend_jax.units import MIB, format_bytes

#: A line longer than this is none of a data file's.
_LONGEST_LINE_BYTES = 256 * MIB
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Place:
    """A line of a file; its text is ``file:line``, counted when it is asked for and not known."""

    __slots__ = ("_line", "lines", "offset")

    def __init__(self, lines: JsonLines, offset: int, line: int | None) -> None:
        self.lines, self.offset, self._line = lines, offset, line

    def __str__(self) -> str:
        if self._line is None:
            self._line = self.lines.line_at(self.offset)
        return self.lines.shown(self._line)


class JsonLines(OfFile):
    """A file of one JSON object per line.

    Args:
        content: the file.
        shown: returns what messages call line n, from 1; by default ``file:n``.
    """

    form = "JSONL"

    def __init__(self, content: AnyBytes, shown: Callable[[int], str] | None = None) -> None:
        self.content = content
        self.name = content.shown
        self.shown = shown or (lambda line: f"{content.shown}:{line}")
        blocks = -(-content.size // BLOCK_BYTES)
        self._sizes = np.full(blocks, BLOCK_BYTES, np.int64)
        if blocks:
            self._sizes[-1] = content.size - (blocks - 1) * BLOCK_BYTES
        #: The number of a block's first line, where it is known.
        self._first_lines = {0: 1}

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self._sizes

    def load(self, block: int) -> Block:
        """Returns the lines that begin in a block."""
        start, data = self._lines_of(block)
        line = self._first_lines.pop(block, None)
        if line is not None:
            self._first_lines[block + 1] = line + data.count(b"\n")
        key = hashlib.blake2b(data, digest_size=32, person=b"jsonl").digest()
        return Block(key, partial(self._items, start, line, data))

    def line_at(self, offset: int) -> int:
        """Returns the number of the line that begins at a byte: reads the file up to it."""
        return 1 + sum(
            self.content.read(at, min(MIB, offset - at)).count(b"\n") for at in range(0, offset, MIB)
        )

    def _lines_of(self, block: int) -> tuple[int, bytes]:
        """The offset of the first line that begins in a block, and the bytes to the end of the last."""
        start, end = block * BLOCK_BYTES, min(self.content.size, (block + 1) * BLOCK_BYTES)
        before = 1 if block else 0
        data = self.content.read(start - before, end - start + before)
        if block:
            # A line begins in this block after a newline; the byte before the block may be one.
            newline = data.find(b"\n")
            start, data = (start + newline, data[newline + 1 :]) if newline >= 0 else (end, b"")
        at = end
        pieces = [data]
        while data and not pieces[-1].endswith(b"\n") and at < self.content.size:
            piece = self.content.read(at, BLOCK_BYTES)
            newline = piece.find(b"\n")
            pieces.append(piece if newline < 0 else piece[: newline + 1])
            at += len(piece)
            if at - start > _LONGEST_LINE_BYTES:
                raise DataError(
                    f"the data file '{self.name}' has a line of more than {format_bytes(_LONGEST_LINE_BYTES)} at byte "
                    f"{start:,}; each line must be one JSON object. For plain text give the file a name that ends in "
                    ".txt, or set data.kind=text"
                )
        return start, b"".join(pieces)

    def _items(self, offset: int, line: int | None, data: bytes, kind: str) -> Iterator[Example | Fault]:
        for text in data.split(b"\n"):
            if text.strip():
                yield self._item(text, Place(self, offset, line), kind)
            offset += len(text) + 1
            line = None if line is None else line + 1

    def _item(self, text: bytes, place: Place, kind: str) -> Example | Fault:
        try:
            example = example_of(_json(text, place.offset), place, kind)
            if b"\\ud" in text.lower():
                example.key.encode()
                "".join(example.texts()).encode()
            return example
        except _NotJsonError as error:
            return Fault(place, str(error), not_json=True, begins=text.lstrip()[:1])
        except UnicodeEncodeError:
            return Fault(place, "half of a surrogate pair (\\ud800 to \\udfff), which is no text")
        except ValueError as error:
            return Fault(place, str(error))


class _NotJsonError(ValueError):
    pass


def _json(line: bytes, offset: int) -> Any:
    if line[:2] in _UTF16:
        raise ValueError("UTF-16 text; write it as UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW")
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text (byte 0x{line[error.start]:02X} at byte {offset + error.start:,} of the file). If it is "
            "Latin-1, write it anew: iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise _NotJsonError(f"not JSON: {reason} at column {getattr(error, 'colno', 1)}") from None


def likely(begins: bytes) -> str:
    """Returns what a file that begins with the sign ``begins`` seems to be, where none of its lines is JSON."""
    if begins == b"{":
        return f"It looks like one JSON object over several lines: write each object on a line of its own. {EXPECTED}"
    return (
        f"It is not a JSONL file. {EXPECTED} To train on plain text give the file a name that ends in .txt, or set "
        "data.kind=text."
    )
