# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: reading a file's header and ranges of its tensors, and writing a header.

Layout: the header's length (uint64, little-endian), the header (JSON: name → dtype, shape, byte range in
the data), the data without gaps. The ``safetensors`` package reads and writes whole tensors only.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.positioned_file import Piece, PositionedFile, read_ahead
from memascend_jax.dtypes import SAFETENSORS_NAME, to_dtype
from memascend_jax.errors import DataError

#: The reference implementation's limit.
_MAX_HEADER_BYTES = 100_000_000
#: More would only make a multiplication long.
_MAX_DIMENSIONS = 32
_TOO_LARGE = 1 << 62
_SHOWN_FAULTS = 8
_OUR_NAME = {theirs: ours for ours, theirs in SAFETENSORS_NAME.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: ``offset`` is from the file's start; ``dtype`` is our name."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


class SafetensorsFile:
    """An open safetensors file, its header checked against its size.

    Raises:
        DataError: the header is not one, or a tensor lies outside the file or upon another.
    """

    def __init__(self, path: Path) -> None:
        self.file = PositionedFile(path)
        try:
            self.tensors = _read_header(self.file)
        except BaseException:
            self.file.close()
            raise

    def pieces(self, name: str, max_bytes: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields ``(first element, flat values)`` in the file's dtype, of at most ``max_bytes`` or one row."""
        for piece, stored in read_ahead(self.plan(name, max_bytes)):
            yield piece.tag[1], elements_of(stored, self.tensors[name].dtype)

    def plan(self, name: str, max_bytes: int) -> Iterator[Piece]:
        """Yields what to read of a tensor for ``pieces``, tagged with the name and the first element."""
        tensor = self.tensors[name]
        size, total = to_dtype(tensor.dtype).itemsize, prod(tensor.shape)
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        step = max(1, max_bytes // (columns * size)) * columns
        for start in range(0, total, step):
            nbytes = min(step, total - start) * size
            yield Piece(self.file, tensor.offset + start * size, nbytes, f"tensor '{name}'", (name, start))

    def close(self) -> None:
        self.file.close()


def elements_of(stored: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Returns ``stored`` as elements; copied where a header of odd length has left them between their boundaries."""
    kind = to_dtype(dtype)
    if stored.ctypes.data % kind.itemsize:
        stored = stored.copy()
    return stored.view(kind)


def header_bytes(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Returns the header of a file that holds ``(name, our dtype, shape)`` one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * to_dtype(dtype).itemsize
        entries[name] = {
            "dtype": SAFETENSORS_NAME[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The data begin at a multiple of 8, as every reader may expect.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_header(file: PositionedFile) -> dict[str, StoredTensor]:
    (length,) = struct.unpack("<Q", file.read(0, 8, "the safetensors header"))
    if length > _MAX_HEADER_BYTES or 8 + length > file.size:
        raise DataError(
            f"cannot read '{file.path}': its header would have {length:,} bytes, in a file of {file.size:,}. It is "
            "truncated or no safetensors file: fetch it again."
        )
    try:
        entries = json.loads(bytes(file.read(8, length, "the safetensors header")), object_pairs_hook=_unique)
        entries.pop("__metadata__", None)
        tensors = _stored_tensors(entries, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot read '{file.path}': its header is malformed: {error}") from error
    _check_places(file, tensors, 8 + length)
    return tensors


def _stored_tensors(entries: dict[str, Any], data: int) -> dict[str, StoredTensor]:
    tensors, faults = {}, []
    for name, entry in entries.items():
        try:
            tensors[name] = _stored_tensor(entry, data)
        except (ValueError, KeyError, TypeError) as error:
            faults.append(f"'{name}': {error}")
    if faults:
        more = f"; and {len(faults) - _SHOWN_FAULTS:,} more" if len(faults) > _SHOWN_FAULTS else ""
        raise ValueError("; ".join(faults[:_SHOWN_FAULTS]) + more)
    return tensors


def _stored_tensor(entry: dict[str, Any], data: int) -> StoredTensor:
    dtype = _OUR_NAME.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {entry['dtype']!r} is not known; known are {', '.join(_OUR_NAME)}")
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"it has {len(shape):,} dimensions, at most {_MAX_DIMENSIONS} are read here")
    if not all(type(size) is int and 0 <= size < _TOO_LARGE for size in (*shape, start, end)):
        raise ValueError(f"a size or offset is no whole number below 2^62: {entry}"[:200])
    if end - start != prod(shape) * to_dtype(dtype).itemsize:
        raise ValueError(f"{end - start:,} bytes cannot hold shape {list(shape)} of {dtype}")
    return StoredTensor(shape, dtype, data + start)


def _check_places(file: PositionedFile, tensors: dict[str, StoredTensor], data: int) -> None:
    end, before = data, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise DataError(f"cannot read '{file.path}': tensor '{name}' lies upon {before}")
        end = tensor.offset + prod(tensor.shape) * to_dtype(tensor.dtype).itemsize
        before = f"'{name}'"
        if end > file.size:
            raise DataError(
                f"cannot read '{file.path}': tensor '{name}' ends at byte {end:,} of a file of {file.size:,}. It is "
                "truncated: fetch it again."
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries
