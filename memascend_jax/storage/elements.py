# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out of the store by copies of bounded size: for imports, exports and everyday use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.storage.batch import Batch, Requests, checked_span, out_of_range
from memascend_jax.storage.bounce import Bounce
from memascend_jax.storage.checksum import crc32c_array, crc32c_many, unit_pieces
from memascend_jax.storage.engine import EngineTicket, ReusedBuffers, address_of, aligned_buffer
from memascend_jax.storage.ticket import Ticket
from memascend_jax.storage.tile_io import TileIo
from memascend_jax.storage.tile_table import StoredTensor
from memascend_jax.storage.whole_number import ANY_SIZE, whole_number
from memascend_jax.units import round_up


def write_elements(
    io: TileIo, bounce: Bounce, tensor: StoredTensor, start: int, values: npt.NDArray[Any]
) -> None:
    """Writes the 1-D ``values``, whole tiles from element ``start`` on.

    Raises:
        StoreError: they do not begin and end at tiles, or the tensor cannot be written.
    """
    layout = tensor.layout
    start = whole_number(start, f"the first element to write of tensor '{tensor.name}'")
    tile_elements = max(layout.tile_elements, 1)
    first, rest = divmod(start, tile_elements)
    end = start + len(values)
    if rest or end > layout.elements or (end % tile_elements and end != layout.elements):
        raise StoreError(
            f"cannot write elements [{start:,}, {end:,}) of tensor '{tensor.name}': they must be whole tiles of "
            f"{layout.tile_elements:,} elements within {layout.elements:,}"
        )
    if len(values) == 0 and layout.elements > 0:
        return
    if layout.unit_bytes > bounce.half_bytes:
        raise StoreError(
            f"cannot write tensor '{tensor.name}', whose checksums are of {layout.unit_bytes:,} bytes, through "
            f"{bounce.half_bytes:,} bytes of bounce memory; open the store with more bounce_bytes"
        )
    tiles = max(-(-end // tile_elements), first + 1) - first
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    disk_bytes = tensor.layout.disk_span(first)[2]
    with io.write_lock, bounce.lock:
        if disk_bytes > bounce.half_bytes:
            for tile in range(first, first + tiles):
                begin = (tile - first) * layout.tile_bytes
                _write_large_tile(io, bounce, tensor, tile, raw[begin : begin + layout.tile_bytes])
        else:
            _write_small_tiles(io, bounce, tensor, first, tiles, raw)


def read_elements(
    io: TileIo, tensor: StoredTensor, start: int, count: int, buffers: ReusedBuffers | None = None
) -> npt.NDArray[Any]:
    """Returns ``count`` elements from ``start`` as a 1-D array, each tile that is whole in it checked.

    Args:
        buffers: where its memory comes from; None: new memory.

    Raises:
        StoreError: out of range, never written, or a checksum does not match.
    """
    layout = tensor.layout
    start = whole_number(start, f"the first element to read of tensor '{tensor.name}'", ANY_SIZE)
    count = whole_number(count, f"the number of elements to read of tensor '{tensor.name}'", ANY_SIZE)
    if start < 0 or count < 0 or start + count > layout.elements:
        raise out_of_range(tensor, start, count)
    per_block = layout.block_bytes // layout.itemsize
    aligned_start = start // per_block * per_block
    span = checked_span(tensor, aligned_start, start + count - aligned_start)
    nbytes = round_up(span.nbytes, layout.block_bytes)
    into = aligned_buffer(nbytes) if buffers is None else buffers.take(nbytes)
    requests = Requests()
    requests.reads.append((tensor, span, address_of(into)))
    io.submit(requests, into, check=True).wait()
    lead = (start - aligned_start) * layout.itemsize
    return into[lead : lead + count * layout.itemsize].view(to_dtype(layout.spec.dtype))


def _write_small_tiles(
    io: TileIo, bounce: Bounce, tensor: StoredTensor, first: int, tiles: int, raw: npt.NDArray[np.uint8]
) -> None:
    layout = tensor.layout
    per_piece = max(bounce.half_bytes // max(tensor.layout.disk_span(first)[2], 1), 1)
    in_flight: list[Ticket | None] = [None, None]
    for turn, piece in enumerate(range(first, first + tiles, per_piece)):
        previous = in_flight[turn % 2]
        if previous is not None:
            previous.wait()
        half = bounce.half(turn)
        begin = (piece - first) * layout.tile_bytes
        data = raw[begin : begin + per_piece * layout.tile_bytes]
        half[: len(data)] = data
        batch = Batch(io)
        for tile in range(piece, min(piece + per_piece, first + tiles)):
            batch.write_tile(tensor.name, tile, address_of(half) + (tile - piece) * layout.tile_bytes)
        in_flight[turn % 2] = batch.submit(half)
    for ticket in in_flight:
        if ticket is not None:
            ticket.wait()


def _write_large_tile(
    io: TileIo, bounce: Bounce, tensor: StoredTensor, tile: int, raw: npt.NDArray[np.uint8]
) -> None:
    """Writes a tile that does not fit half the bounce memory, piece by piece; it becomes current at the end."""
    # The lock keeps readers of this tile away from what is neither the old nor the new one.
    with io.write_lock, io.lock:
        io.check_writable()
        io.check_replaceable(tensor, tile)
        io.settle_tile(tensor, tile)
        place = tensor.write_place(tile)
        if tensor.committed[tile] == place:
            io.before_overwrite()
        if tensor.place[tile] == place:
            # Should this fail, the tile is lost; else its older contents are in the other place.
            tensor.poisoned.add(tile)
        store_address = tensor.bases[place] + tensor.layout.disk_span(tile)[0]
        checksums = _write_pieces(io, bounce, tensor, store_address, raw)
        tensor.place[tile] = place
        tensor.checksums[tensor.tile_units(tile)] = checksums
        tensor.poisoned.discard(tile)


def _write_pieces(
    io: TileIo, bounce: Bounce, tensor: StoredTensor, store_address: int, raw: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint32]:
    """Writes ``raw`` from ``store_address`` on and returns its checksums."""
    layout = tensor.layout
    unit = layout.unit_bytes or layout.block_bytes
    piece_bytes = bounce.half_bytes // unit * unit
    in_flight: list[EngineTicket | None] = [None, None]
    running = 0
    parts: list[npt.NDArray[np.uint32]] = []
    try:
        for turn, begin in enumerate(range(0, len(raw), piece_bytes)):
            previous = in_flight[turn % 2]
            if previous is not None:
                previous.wait()
            half = bounce.half(turn)
            data = raw[begin : begin + piece_bytes]
            disk_bytes = round_up(len(data), layout.block_bytes)
            half[: len(data)] = data
            half[len(data) : disk_bytes] = 0
            if layout.unit_bytes:
                parts.append(crc32c_many(*unit_pieces(address_of(half), len(data), layout.unit_bytes)))
            else:
                running = crc32c_array(half[: len(data)], running)
            extent = np.array([[store_address + begin, address_of(half), disk_bytes]], np.int64)
            in_flight[turn % 2] = io.volume.submit_write(extent, half)
        for ticket in in_flight:
            if ticket is not None:
                ticket.wait()
    except OSError as error:
        _let_end(in_flight)
        raise io.explained([tensor.name], "write", error) from error
    return np.concatenate(parts) if layout.unit_bytes else np.array([running], np.uint32)


def _let_end(tickets: Iterable[EngineTicket | None]) -> None:
    """Waits for what a failure has left on its way: it would still be writing when the tile is written again."""
    for ticket in tickets:
        if ticket is not None:
            with suppress(OSError):
                ticket.wait()
