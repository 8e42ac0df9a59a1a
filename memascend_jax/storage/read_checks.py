# SPDX-License-Identifier: Apache-2.0
"""What memory must hold after a read, by the checksums of the tiles and units that were read whole."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage.batch import Span
from memascend_jax.storage.checksum import crc32c_many, unit_pieces
from memascend_jax.storage.layout import Int64Array
from memascend_jax.storage.store_errors import OVERWRITTEN
from memascend_jax.storage.tile_table import StoredTensor

#: (tensor, where each piece lies, its bytes, its checksum).
Check = tuple[StoredTensor, Int64Array, Int64Array, npt.NDArray[np.uint32]]


def expected_checksums(tensor: StoredTensor, span: Span, address: int) -> list[Check]:
    """Returns what the memory of each checksum unit or tile that ``span`` holds whole must be."""
    layout = tensor.layout
    end = min(span.offset + span.nbytes, layout.nbytes)
    if layout.unit_bytes:
        first = -(-span.offset // layout.unit_bytes)
        last = layout.units if end == layout.nbytes else end // layout.unit_bytes
        if last <= first:
            return []
        begin = first * layout.unit_bytes
        stop = min(last * layout.unit_bytes, layout.nbytes)
        pieces = unit_pieces(address + begin - span.offset, stop - begin, layout.unit_bytes)
        return [(tensor, *pieces, tensor.checksums[first:last].copy())]
    whole = []
    for tile in range(span.first_tile, span.end_tile):
        begin, nbytes, _ = layout.disk_span(tile)
        if nbytes and span.offset <= begin and begin + nbytes <= end:
            whole.append((tile, address + begin - span.offset, nbytes))
    if not whole:
        return []
    tiles, addresses, lengths = np.array(whole, np.int64).T.copy()
    return [(tensor, addresses, lengths, tensor.checksums[tiles])]


def expected_unit_checksums(tensor: StoredTensor, units: Int64Array, addresses: Int64Array) -> list[Check]:
    """Returns what the memory of scattered ``units`` must hold; nothing for a tensor without row access."""
    layout = tensor.layout
    if not layout.unit_bytes:
        return []
    lengths = np.minimum(layout.unit_bytes, layout.nbytes - units * layout.unit_bytes)
    return [(tensor, addresses, lengths, tensor.checksums[units])]


def tiles_of(tensor: StoredTensor, units: Int64Array) -> Int64Array:
    """Returns the tile that each of ``units`` lies in; units never cross tiles."""
    layout = tensor.layout
    return units * (layout.unit_bytes or layout.block_bytes) // layout.tile_bytes


def mismatch(checks: Iterable[Check], path: str, overwritten: bool) -> StoreError | None:
    """Returns the error when memory does not have the checksums of ``checks``, else None.

    ``overwritten``: the store was found dirty, so that its last run, not the disk, is to blame.
    """
    for tensor, addresses, lengths, expected in checks:
        if not np.array_equal(crc32c_many(addresses, lengths), expected):
            why = (
                f"the store {OVERWRITTEN}"
                if overwritten
                else "the disk returned other data than was written; find all of the damage with memascend store "
                "verify, then remove the store and start again"
            )
            return StoreError(f"tensor '{tensor.name}' in store '{path}' does not match its checksum: {why}")
    return None
