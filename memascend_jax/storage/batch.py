# SPDX-License-Identifier: Apache-2.0
"""Reads and writes gathered into one submission: the store's fast path.

Nothing here copies: addresses are of page-aligned slots whose room is rounded up to the block. Collecting a
request costs a dictionary look-up and an append; everything else is done once per batch on arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage.layout import Int64Array
from memascend_jax.storage.tile_table import StoredTensor
from memascend_jax.storage.whole_number import ANY_SIZE, whole_number
from memascend_jax.units import round_up

if TYPE_CHECKING:
    from memascend_jax.storage.scratch import Scratch
    from memascend_jax.storage.ticket import Ticket
    from memascend_jax.storage.tile_io import TileIo


class Span(NamedTuple):
    """A checked run of elements: its tiles, where it begins in a place, its bytes and bytes on disk."""

    first_tile: int
    end_tile: int
    offset: int
    nbytes: int
    disk_bytes: int


class Requests:
    """What one submission asks for."""

    __slots__ = ("reads", "scratch_reads", "scratch_writes", "unit_reads", "writes")

    def __init__(self) -> None:
        self.reads: list[tuple[StoredTensor, Span, int]] = []
        self.writes: list[tuple[StoredTensor, int, int]] = []
        #: (tensor, sorted numbers of checksum units or blocks, where each of them goes).
        self.unit_reads: list[tuple[StoredTensor, Int64Array, Int64Array]] = []
        self.scratch_reads: list[tuple[Scratch, int, int, int]] = []
        self.scratch_writes: list[tuple[Scratch, int, int, int]] = []


class Batch:
    """Collects reads and writes and submits them together. Empty and usable again after ``submit``.

    A read sees the newest write that was submitted before it, committed or not; in one batch a read and a write of
    the same tile are refused. Requests that continue each other on disk and in memory become one.

    Threading: a batch belongs to one thread; different batches may be submitted from different threads.
    """

    __slots__ = ("_io", "_requests", "_tensors")

    def __init__(self, io: TileIo) -> None:
        self._io = io
        self._tensors = io.table.tensors
        self._requests = Requests()

    def read(self, name: str, address: int, start_element: int = 0, n_elements: int | None = None) -> None:
        """Adds a read of ``n_elements`` from ``start_element`` (None: to the end) of ``name`` to ``address``.

        Args:
            address: page-aligned memory with room for the bytes rounded up to the block; what lies behind the
                elements there is overwritten with padding.

        Raises:
            StoreError: no such tensor, elements out of range, or a start that is not block aligned.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._io.unknown(name)
        span = tensor.spans.get((start_element, n_elements))
        if span is None:
            span = tensor.spans[start_element, n_elements] = checked_span(tensor, start_element, n_elements)
        self._requests.reads.append((tensor, span, address))

    def write_tile(self, name: str, tile: int, address: int) -> None:
        """Adds a write of ``tile`` of ``name`` from ``address``.

        The tile's checksum is computed at ``submit``; until the ticket's ``wait`` returns, the memory must not
        change. The slot's room behind the last element, up to the block, is set to zero.

        Raises:
            StoreError: no such tensor or tile.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._io.unknown(name)
        if tile.__class__ is not int:
            tile = whole_number(tile, f"the tile to write of tensor '{name}'", ANY_SIZE)
        if not 0 <= tile < tensor.layout.tiles:
            raise StoreError(
                f"cannot write tile {tile} of tensor '{name}': it has tiles 0 to {tensor.layout.tiles - 1}"
            )
        self._requests.writes.append((tensor, tile, address))

    def read_rows(
        self, name: str, rows: npt.NDArray[np.int64], address: int, row_stride_bytes: int
    ) -> npt.NDArray[np.int64]:
        """Adds one read per row: the whole blocks that hold row ``rows[i]``, to ``address + i * row_stride_bytes``.

        Returns:
            For each row the byte, within its stretch of ``row_stride_bytes``, where its first element will be.

        Raises:
            StoreError: no such tensor, a row out of range, or a stride that is no multiple of the block or has
                no room for the blocks of a row.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._io.unknown(name)
        layout = tensor.layout
        rows = checked_rows(tensor, rows)
        block = layout.block_bytes
        begin = rows * layout.row_bytes
        first = begin // block * block
        end = np.minimum(-(-(begin + layout.row_bytes) // block) * block, layout.place_bytes)
        need = int((end - first).max(initial=0))
        if row_stride_bytes % block or row_stride_bytes < need:
            raise StoreError(
                f"cannot read rows of tensor '{name}' {row_stride_bytes:,} bytes apart: the blocks of a row are up "
                f"to {need:,} bytes; use a multiple of {block:,} that holds them"
            )
        for index, (offset, disk_bytes) in enumerate(
            zip(first.tolist(), (end - first).tolist(), strict=True)
        ):
            tile, last = offset // layout.tile_bytes, (offset + disk_bytes - 1) // layout.tile_bytes
            span = Span(tile, last + 1, offset, disk_bytes, disk_bytes)
            self._requests.reads.append((tensor, span, address + index * row_stride_bytes))
        return begin - first

    def scratch_read(self, scratch: Scratch, address: int, nbytes: int, offset: int) -> None:
        """Adds a read of a scratch extent; see ``Scratch.read``."""
        self._requests.scratch_reads.append((scratch, address, nbytes, offset))

    def scratch_write(self, scratch: Scratch, address: int, nbytes: int, offset: int) -> None:
        """Adds a write of a scratch extent; see ``Scratch.write``."""
        self._requests.scratch_writes.append((scratch, address, nbytes, offset))

    def submit(self, keepalive: object = None, urgent: bool = False) -> Ticket:
        """Starts everything collected and returns its ticket; ``keepalive`` is held until the I/O is complete.

        Reads that are ``urgent``, because a computation waits for them, go before all that is queued and is not.

        Does not wait for this I/O, but for older I/O on the same tiles, and for room in the queue.

        Raises:
            StoreError: a tile that was never written or whose last write failed is read, a read-only tensor is
                written again, or the store is closed or read-only. Nothing is submitted then.
        """
        requests, self._requests = self._requests, Requests()
        return self._io.submit(requests, keepalive, urgent=urgent)


def checked_span(tensor: StoredTensor, start: int, count: int | None) -> Span:
    """Returns the span of ``count`` elements from ``start``; raises ``StoreError`` when they are out of range."""
    layout = tensor.layout
    start = whole_number(start, f"the first element to read of tensor '{tensor.name}'", ANY_SIZE)
    if count is not None:
        count = whole_number(count, f"the number of elements to read of tensor '{tensor.name}'", ANY_SIZE)
    elements = layout.elements - start if count is None else count
    if start < 0 or elements < 0 or start + elements > layout.elements:
        raise out_of_range(tensor, start, elements)
    offset = start * layout.itemsize
    nbytes = elements * layout.itemsize
    if offset % layout.block_bytes:
        raise StoreError(
            f"cannot read tensor '{tensor.name}' from element {start:,} without a copy: byte {offset:,} is not a "
            f"multiple of the block of {layout.block_bytes:,} bytes; start at a tile, or use read_elements"
        )
    if elements == 0:
        return Span(0, 0, offset, 0, 0)
    first_tile = start // layout.tile_elements
    end_tile = (start + elements - 1) // layout.tile_elements + 1
    return Span(first_tile, end_tile, offset, nbytes, round_up(nbytes, layout.block_bytes))


def out_of_range(tensor: StoredTensor, start: int, count: int) -> StoreError:
    """Returns the error for elements that ``tensor`` does not have."""
    layout = tensor.layout
    return StoreError(
        f"cannot read elements [{start:,}, {start + count:,}) of tensor '{tensor.name}': it has "
        f"{layout.elements:,} (shape {layout.spec.shape})"
    )


def checked_rows(tensor: StoredTensor, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns ``rows`` as int64; raises ``StoreError`` unless all are rows of ``tensor``."""
    shape = tensor.layout.spec.shape
    count = shape[0] if shape else 1
    rows = np.asarray(rows)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise StoreError(f"rows must be a 1-D array of integers, got {rows.dtype} of shape {rows.shape}")
    outside = (rows < 0) | (rows >= count)
    if outside.any():
        raise StoreError(
            f"cannot read row {int(rows[outside][0]):,} of tensor '{tensor.name}': it has rows 0 to {count - 1:,}"
        )
    return rows.astype(np.int64, copy=False)
