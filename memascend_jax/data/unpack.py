# SPDX-License-Identifier: Apache-2.0
"""Files that can be read only from their beginning, written anew as lines: gzip, and one JSON array.

Small ones stay in memory. Large ones are written to the cache once, for examples are read in any order.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend_jax.data.file_bytes import AnyBytes, FileBytes, MemoryBytes
from memascend_jax.errors import DataError
from memascend_jax.observe.whole_file import write_whole
from memascend_jax.units import MIB, format_bytes

_PIECE_BYTES = MIB
#: What is unpacked to up to this size stays in memory.
_MOST_IN_MEMORY_BYTES = 64 * MIB
#: An element of an array longer than this is none of a data file's.
_LONGEST_ELEMENT = 256 * MIB
#: Signs of JSON that may be cut off, such as an escape.
_NEAR_END = 12


@dataclass(frozen=True, slots=True)
class Unpacker:
    """Where large files are unpacked to.

    Args:
        folder: a folder of the cache; None: nothing may be written, and large files are refused.
        say: told what takes long.
        looks_only: nothing is written, and of large files only the beginning is there.
    """

    folder: Path | None
    say: Callable[[str], object] = lambda text: None
    looks_only: bool = False

    def unpacked(self, content: AnyBytes, pieces: Callable[[AnyBytes], Iterator[bytes]]) -> AnyBytes:
        """Returns what ``pieces`` yields of ``content``, in memory or as a file of the cache.

        Raises:
            DataError: it is damaged, or large and there is no cache.
            OSError: the cache cannot be written.
        """
        if self.folder is not None:
            path = self.folder / f"{content.fingerprint()[:32]}.{pieces.__name__}"
            if path.exists():
                return FileBytes(path, content.shown)
        held: list[bytes] = []
        nbytes = 0
        more = pieces(content)
        for piece in more:
            held.append(piece)
            nbytes += len(piece)
            if nbytes > _MOST_IN_MEMORY_BYTES:
                break
        else:
            return MemoryBytes(b"".join(held), content.shown)
        if self.looks_only:
            beginning = b"".join(held)
            return MemoryBytes(beginning[: beginning.rfind(b"\n") + 1], content.shown)
        if self.folder is None:
            raise DataError(
                f"the data file '{content.shown}' is read only from its beginning, and is more than "
                f"{format_bytes(_MOST_IN_MEMORY_BYTES)} unpacked: it needs a place to be written to as lines; set "
                "data.cache to a folder, or give it as JSONL, which is read as it is"
            )
        self.say(f"writing {content.shown} to {path} as lines, which is done once; JSONL is read as it is")

        def write(draft: Path) -> None:
            with open(draft, "wb") as file:
                file.writelines(held)
                held.clear()
                file.writelines(more)

        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, write, "the unpacked data")
        return FileBytes(path, content.shown)


def gunzip(content: AnyBytes) -> Iterator[bytes]:
    """Yields what a gzip file holds.

    Raises:
        DataError: it is damaged or cut short.
    """
    with gzip.GzipFile(fileobj=io.BufferedReader(_Raw(content), _PIECE_BYTES)) as file:
        while True:
            try:
                piece = file.read(_PIECE_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(
                    f"cannot unpack the data file '{content.shown}': {error}; fetch it again, or unpack it"
                ) from error
            if not piece:
                return
            yield piece


def elements(content: AnyBytes) -> Iterator[bytes]:
    """Yields the elements of a JSON array, each as one line; holds little more than one of them at a time.

    Raises:
        DataError: it is not JSON, with the element and the byte.
    """
    text = _Text(content)
    decoder = json.JSONDecoder()
    if text.sign() != "[":
        raise text.fault(0, "it does not begin with [")
    text.at += 1
    number = 0
    while text.sign() != "]":
        if number:
            if text.sign() != ",":
                raise text.fault(number, f"expected a comma after it, got {text.sign()!r}")
            text.at += 1
            text.sign()
        number += 1
        value, text.at = _element(text, decoder, number)
        yield json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _element(text: _Text, decoder: json.JSONDecoder, number: int) -> tuple[Any, int]:
    """The element that begins here, and where it ends."""
    while True:
        try:
            value, end = decoder.raw_decode(text.text, text.at)
        except RecursionError:
            raise text.fault(number, "nested too deeply") from None
        except json.JSONDecodeError as error:
            # What is cut off is found to be wrong at its end, or where its last string begins.
            cut_off = error.pos > len(text.text) - _NEAR_END or error.msg.startswith("Unterminated string")
            if not cut_off or len(text.text) - text.at > _LONGEST_ELEMENT or not text.fill():
                raise text.fault(number, error.msg) from None
        else:
            # A number at the end of what has been read may go on.
            if end < len(text.text) or not text.fill():
                return value, end


class _Text:
    """The text of a file from where it has been read to; ``at`` is the place in ``text``."""

    def __init__(self, content: AnyBytes) -> None:
        self.text, self.at = "", 0
        self._content, self._offset = content, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def sign(self) -> str:
        """Returns the character here, which is no space; goes to it."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.fill():
                raise self.fault(0, "it ends within the array")

    def fill(self) -> bool:
        """Reads on, at least as much as there is; returns whether there was something."""
        data = self._content.read(self._offset, max(_PIECE_BYTES, len(self.text) - self.at))
        try:
            more = self._decoder.decode(data, not data)
        except UnicodeDecodeError as error:
            raise DataError(
                f"the data file '{self._content.shown}' is not UTF-8 text at byte {self._offset + error.start:,}: "
                f"{error.reason}. If it is Latin-1, write it anew: iconv -f latin1 -t utf-8 OLD > NEW"
            ) from error
        self._offset += len(data)
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(data)

    def fault(self, number: int, why: str) -> DataError:
        """Returns the error that says what is wrong with an element."""
        where = f"element {number}" if number else "the file"
        return DataError(
            f"the data file '{self._content.shown}' is not a JSON array: {where}, before byte {self._offset:,}: {why}. "
            "Write one array of objects, or JSONL"
        )


class _Raw(io.RawIOBase):
    """The bytes of a data file as Python's own file."""

    def __init__(self, content: AnyBytes) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
