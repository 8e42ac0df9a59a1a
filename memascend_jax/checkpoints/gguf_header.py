# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: its metadata, and where each tensor lies.

Layout (little-endian): magic ``GGUF``, version, counts; then ``(key, type, value)`` for each metadata
entry; then ``(name, dimensions, type, offset)`` for each tensor; then, aligned, the tensors' data.

The ``gguf`` package's reader maps the file and makes several Python objects of each token; this one
reads ranges, and leaves long arrays where they are until asked.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.errors import DataError

_WINDOW_BYTES = 1 << 20
_MAX_DIMENSIONS = 4
#: Of a name, a template or a token; what is longer is read by nobody.
_MAX_STRING_BYTES = 16 << 20
#: Bytes of a tensor's entry without name or dimensions, and of an entry of the metadata without key or value.
_SMALLEST_TENSOR, _SMALLEST_ENTRY = 24, 12
#: What a file may claim to have; each costs time and memory to list.
_MOST_TENSORS, _MOST_ENTRIES, _MOST_TEXTS = 1 << 20, 1 << 16, 1 << 23
_STRING, _ARRAY = 8, 9

#: struct formats of the scalar types, by type number.
_SCALAR = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class DeferredArray:
    """An array of the metadata that stays in the file; ``GgufHeader.array`` reads it."""

    offset: int
    type: int
    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: ``shape`` has the rows first, ``offset`` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GgufHeader:
    """The metadata and the tensors' places of an open GGUF file.

    Raises:
        DataError: not a GGUF file of version 2 or 3, or a header that does not fit the file.
    """

    def __init__(self, file: PositionedFile) -> None:
        self._file = file
        cursor = _Cursor(file, 0)
        if bytes(cursor.take(4)) != b"GGUF":
            raise DataError(f"cannot read '{file.path}': it does not begin as a GGUF file does")
        version = cursor.scalar(4)
        if version not in (2, 3):
            swapped = "; it was written for big-endian machines" if version in (2 << 24, 3 << 24) else ""
            raise DataError(
                f"cannot read '{file.path}': GGUF version {version} is not known; known are 2 and 3{swapped}"
            )
        tensor_count, entry_count = cursor.scalar(10), cursor.scalar(10)
        too_many = tensor_count > _MOST_TENSORS or entry_count > _MOST_ENTRIES
        if too_many or tensor_count * _SMALLEST_TENSOR + entry_count * _SMALLEST_ENTRY > file.size:
            raise DataError(
                f"cannot read '{file.path}': it would have {tensor_count:,} tensors and {entry_count:,} entries of "
                f"metadata, in {file.size:,} bytes. It is truncated or damaged: fetch it again."
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            if key in self.metadata:
                raise DataError(f"cannot read '{file.path}': the metadata {key!r} occurs twice")
            self.metadata[key] = _value(cursor, cursor.scalar(4), key)
        entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
        names = Counter(name for name, *_ in entries)
        if len(names) < len(entries):
            twice = [repr(name) for name, count in names.items() if count > 1]
            raise DataError(f"cannot read '{file.path}': tensors occur twice: {', '.join(twice[:8])}")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise DataError(f"cannot read '{file.path}': alignment {alignment!r} is not a power of two")
        data = -(-cursor.position // alignment) * alignment
        self.tensors = [GgufTensor(name, shape, kind, data + offset) for name, shape, kind, offset in entries]
        self.end = cursor.position

    def array(self, key: str) -> list[Any] | None:
        """Returns the array ``key``, read now, or None when the file has none of that name."""
        deferred = self.metadata.get(key)
        if deferred is None:
            return None
        if not isinstance(deferred, DeferredArray):
            raise DataError(f"cannot read '{self._file.path}': {key} is not an array")
        cursor = _Cursor(self._file, deferred.offset)
        if deferred.type == _STRING:
            return [cursor.string() for _ in range(deferred.count)]
        return [cursor.scalar(deferred.type) for _ in range(deferred.count)]


class _Cursor:
    """Reads values in order through a window of the file."""

    def __init__(self, file: PositionedFile, position: int) -> None:
        self._file = file
        self.position = position
        self._window = memoryview(b"")
        self._window_start = position

    def take(self, nbytes: int) -> memoryview:
        start = self.position - self._window_start
        if start + nbytes > len(self._window):
            wanted = max(nbytes, min(_WINDOW_BYTES, self._file.size - self.position))
            self._window = memoryview(self._file.read(self.position, wanted, "the GGUF header"))
            self._window_start, start = self.position, 0
        self.position += nbytes
        return self._window[start : start + nbytes]

    def skip(self, nbytes: int) -> None:
        if self.position + nbytes > self._file.size:
            self.take(nbytes)  # raises with the sizes
        self.position += nbytes
        if self.position - self._window_start > len(self._window):
            self._window, self._window_start = memoryview(b""), self.position

    def scalar(self, kind: int) -> Any:
        form = _SCALAR.get(kind)
        if form is None:
            raise DataError(f"cannot read '{self._file.path}': unknown metadata type {kind}")
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        nbytes = self.scalar(10)
        if nbytes > _MAX_STRING_BYTES and self.position + nbytes <= self._file.size:
            raise DataError(f"cannot read '{self._file.path}': a text in its metadata has {nbytes:,} bytes")
        return bytes(self.take(nbytes)).decode("utf-8", errors="replace")


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.scalar(kind)
    item, count = cursor.scalar(4), cursor.scalar(10)
    deferred = DeferredArray(cursor.position, item, count)
    if item == _STRING:
        if count > _MOST_TEXTS:
            raise DataError(f"cannot read the GGUF metadata {key!r}: it would have {count:,} texts")
        for _ in range(count):
            cursor.skip(cursor.scalar(10))
    elif item in _SCALAR:
        cursor.skip(count * struct.calcsize("<" + _SCALAR[item]))
    else:
        raise DataError(f"cannot read the GGUF metadata {key!r}: arrays of type {item} are not known")
    return deferred


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar(4)
    if dimensions > _MAX_DIMENSIONS:
        raise DataError(
            f"cannot read the GGUF tensor {name!r}: it has {dimensions} dimensions, at most 4 exist"
        )
    # GGUF lists the fastest-varying dimension first.
    shape = tuple(cursor.scalar(10) for _ in range(dimensions))[::-1]
    if prod(shape) >= 1 << 62:
        raise DataError(f"cannot read the GGUF tensor {name!r}: its shape {list(shape)} is impossible")
    return name, shape, cursor.scalar(4), cursor.scalar(10)
