# SPDX-License-Identifier: Apache-2.0
"""Scattered rows of a tensor in one call.

Rows need not be a multiple of the block (a row of 576 bfloat16 is 1,152 bytes), so rows share blocks and lie
across them; traffic counts whole checksum units, each of which is read once however many rows want it, checked, and
its rows copied apart. Rows of whole units go straight to where they belong when memory there is aligned.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.storage.batch import Requests, checked_rows
from memascend_jax.storage.bounce import Bounce
from memascend_jax.storage.engine import Int64Array, address_of
from memascend_jax.storage.ticket import Ticket
from memascend_jax.storage.tile_io import MEMORY_ALIGNMENT, TileIo
from memascend_jax.storage.tile_table import StoredTensor
from memascend_jax.units import round_up

#: Shorter rows are copied faster all at once than one by one.
_LOOP_ROW_BYTES = 512
#: Into how many parts the bounce memory is cut where a row fits them. While one is copied apart, the others hold
#: more requests than are in flight: with two, the disk had too few of them at the end of each.
_PARTS = (8, 4, 2)
#: Rows that need no copy are checked in pieces of about this much while the disk is busy with the next.
_DIRECT_BYTES = 4 << 20


class _Piece(NamedTuple):
    """Rows ``[begin, end)`` in disk order, and the units that hold them."""

    begin: int
    end: int
    units: Int64Array


class _Read(NamedTuple):
    """A piece on its way, and where its units go, one after the other."""

    piece: _Piece
    ticket: Ticket
    memory: npt.NDArray[np.uint8]


def read_rows(
    io: TileIo, bounce: Bounce, tensor: StoredTensor, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]
) -> None:
    """Fills ``out[i]`` with row ``rows[i]``; see ``TensorStore.read_rows``."""
    rows = checked_rows(tensor, rows)
    row_bytes = tensor.layout.row_bytes
    _check_out(tensor, len(rows), out)
    if len(rows) == 0 or row_bytes == 0:
        return
    order = np.argsort(rows, kind="stable")
    starts = rows[order] * row_bytes
    target = out.reshape(len(rows), -1).view(np.uint8)
    unit = tensor.layout.unit_bytes or tensor.layout.block_bytes
    if row_bytes % unit == 0 and address_of(target) % MEMORY_ALIGNMENT == 0:
        _read_in_place(io, tensor, starts, order, target)
    else:
        _read_and_copy(io, bounce, tensor, starts, order, target)


def _read_and_copy(
    io: TileIo,
    bounce: Bounce,
    tensor: StoredTensor,
    starts: Int64Array,
    order: Int64Array,
    target: npt.NDArray[np.uint8],
) -> None:
    """Reads the units of all rows, each once, through bounded memory, and copies the rows to ``target``."""
    row_bytes = target.shape[1]
    unit = tensor.layout.unit_bytes or tensor.layout.block_bytes
    with bounce.lock:
        room = round_up(row_bytes, unit) + unit
        if room > bounce.half_bytes:
            raise StoreError(
                f"cannot read rows of {row_bytes:,} bytes of tensor '{tensor.name}' through {bounce.half_bytes:,} "
                "bytes of bounce memory; open the store with more bounce_bytes"
            )
        parts = bounce.parts(next(count for count in _PARTS if room <= 2 * bounce.half_bytes // count))
        waiting: deque[_Read] = deque()
        try:
            for turn, piece in enumerate(_pieces(starts, row_bytes, unit, len(parts[0]))):
                if len(waiting) == len(parts):
                    _scatter(waiting.popleft(), starts, order, row_bytes, unit, target)
                part = parts[turn % len(parts)]
                addresses = address_of(part) + np.arange(len(piece.units)) * unit
                waiting.append(_Read(piece, _submit(io, tensor, piece.units, addresses, part), part))
            while waiting:
                _scatter(waiting.popleft(), starts, order, row_bytes, unit, target)
        finally:
            # After a failure, what is still on its way would land in memory that the next caller uses.
            for read in waiting:
                io.settle(read.ticket)


def _read_in_place(
    io: TileIo, tensor: StoredTensor, starts: Int64Array, order: Int64Array, target: npt.NDArray[np.uint8]
) -> None:
    """Reads rows of whole units to their places in ``target``; all are submitted before the first is waited for."""
    row_bytes = target.shape[1]
    unit = tensor.layout.unit_bytes or tensor.layout.block_bytes
    places = address_of(target) + order * row_bytes
    within = np.arange(row_bytes // unit)
    per_piece = max(_DIRECT_BYTES // row_bytes, 1)
    tickets: deque[Ticket] = deque()
    try:
        for begin in range(0, len(starts), per_piece):
            rows = slice(begin, begin + per_piece)
            units = starts[rows, None] // unit + within
            addresses = places[rows, None] + within * unit
            tickets.append(_submit(io, tensor, units.reshape(-1), addresses.reshape(-1), target))
        while tickets:
            tickets.popleft().wait()
    finally:
        for ticket in tickets:
            io.settle(ticket)


def _pieces(starts: Int64Array, row_bytes: int, unit: int, room: int) -> list[_Piece]:
    """Cuts the sorted rows into pieces whose distinct units fit ``room`` bytes."""
    first, last = starts // unit, (starts + row_bytes - 1) // unit
    # New units that each row adds to those of the rows before it.
    seen = np.concatenate(([-1], np.maximum.accumulate(last)[:-1]))
    added = np.maximum(last - np.maximum(first - 1, seen), 0)
    total = np.cumsum(added)
    width = int((last - first).max()) + 1
    per_piece = max(room // unit - width, 1)
    bounds = [0, *(np.flatnonzero(np.diff((total - 1) // per_piece)) + 1).tolist(), len(starts)]
    return [
        _Piece(begin, end, _distinct_units(first[begin:end], last[begin:end]))
        for begin, end in pairwise(bounds)
        if end > begin
    ]


def _distinct_units(first: Int64Array, last: Int64Array) -> Int64Array:
    counts = last - first + 1
    source = np.repeat(np.arange(len(first)), counts)
    step = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.unique(first[source] + step)


def _submit(
    io: TileIo,
    tensor: StoredTensor,
    units: Int64Array,
    addresses: Int64Array,
    memory: npt.NDArray[np.uint8],
) -> Ticket:
    """Starts reading each of ``units`` to its place in ``memory``."""
    requests = Requests()
    requests.unit_reads.append((tensor, units, addresses))
    return io.submit(requests, memory, check=True)


def _scatter(
    read: _Read,
    starts: Int64Array,
    order: Int64Array,
    row_bytes: int,
    unit: int,
    target: npt.NDArray[np.uint8],
) -> None:
    """Waits for a piece and copies its rows to where they belong."""
    piece, ticket, memory = read
    ticket.wait()
    begins = starts[piece.begin : piece.end]
    # A row's units are neighbours in the sorted distinct ones, so its bytes are contiguous in the piece.
    position = np.searchsorted(piece.units, begins // unit) * unit + begins % unit
    wanted = order[piece.begin : piece.end]
    if row_bytes < _LOOP_ROW_BYTES:
        windows = np.lib.stride_tricks.sliding_window_view(memory, row_bytes)
        target[wanted] = windows[position]
        return
    # Indexing would gather all rows into new memory first, which costs more than a loop does.
    source, into = memory.data, target.reshape(-1).data
    for at, row in zip(position.tolist(), (wanted * row_bytes).tolist(), strict=True):
        into[row : row + row_bytes] = source[at : at + row_bytes]


def _check_out(tensor: StoredTensor, count: int, out: npt.NDArray[Any]) -> None:
    layout = tensor.layout
    dtype = to_dtype(layout.spec.dtype)
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise StoreError(
            f"cannot read rows of tensor '{tensor.name}' into out: it must be a writable numpy array, got "
            + ("a read-only one" if isinstance(out, np.ndarray) else f"{out!r:.80} ({type(out).__name__})")
        )
    if out.dtype != dtype or out.size != count * layout.row_elements or not out.flags.c_contiguous:
        raise StoreError(
            f"cannot read {count:,} rows of tensor '{tensor.name}' into an array of {out.dtype} with shape "
            f"{out.shape}: it must be C-contiguous {dtype} with {layout.row_elements:,} elements per row"
        )
