# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file: where they may lie, and their rows dequantised in small blocks."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.gguf_header import GgufHeader, GgufTensor
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.errors import DataError

#: Dequantising makes several temporaries of its output's size, so it is done in blocks of this size.
_BLOCK_BYTES = 1 << 20
_SHOWN_FAULTS = 8


def read_rows(file: PositionedFile, place: GgufTensor, start: int, rows: int) -> NDArray[np.float32]:
    """Returns ``rows`` rows of a tensor from row ``start``, as float32 ``[rows, columns]``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind, columns = GGMLQuantizationType(place.type), place.shape[-1]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = columns // block * block_bytes
    values = np.empty((rows, columns), np.float32)
    step = max(1, _BLOCK_BYTES // (4 * columns))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        offset = place.offset + (start + first) * row_bytes
        stored = np.frombuffer(file.read(offset, count * row_bytes, f"tensor '{place.name}'"), np.uint8)
        values[first : first + count] = dequantize(stored.reshape(count, row_bytes), kind)
    return values


def unpermuted(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Returns Hugging Face's order of the rows of whole heads.

    GGUF interleaves the two halves of a head, which rotary positions pair: its row ``2 i + t`` of a head is
    Hugging Face's row ``t * head_dim / 2 + i``.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def check_places(file: PositionedFile, header: GgufHeader) -> None:
    """Returns when every tensor is of a known type, inside the file, and not upon another.

    Raises:
        DataError: lists the tensors that are not.
    """
    faults, end, before = [], header.end, "the header"
    outside, last = 0, 0
    for place in sorted(header.tensors, key=lambda place: place.offset):
        nbytes = _stored_bytes(place)
        if nbytes is None:
            faults.append(
                f"'{place.name}' has type {place.type} and shape {list(place.shape)}, not read here"
            )
            continue
        if place.offset < end:
            faults.append(f"'{place.name}' lies upon {before}")
        end, before = place.offset + nbytes, f"'{place.name}'"
        outside, last = outside + (end > file.size), max(end, last)
    if outside:
        faults.insert(
            0,
            f"it has {file.size:,} bytes, its tensors reach to byte {last:,}: {outside:,} of {len(header.tensors):,} "
            "are cut off, so it is truncated or damaged",
        )
    if faults:
        more = f"; and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
        raise DataError(
            f"cannot use the model '{file.path}': {'; '.join(faults[:_SHOWN_FAULTS])}{more}. Fetch the file again."
        )


def _stored_bytes(place: GgufTensor) -> int | None:
    """The bytes of a tensor in the file; None when its type or row length cannot be dequantised."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(place.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    if not place.shape or place.shape[-1] % block:
        return None
    return prod(place.shape) // block * block_bytes
