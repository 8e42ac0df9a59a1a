# SPDX-License-Identifier: Apache-2.0
"""Submits batches: which place each tile is read from and written to, checksums, and the order between batches.

Order: the engine keeps none, so a batch first waits for older batches in flight that touch the same tile in a
way that matters (read after write, write after read, write after write). A failed write poisons its tiles: they
cannot be read or committed until they are written again.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.observe import trace
from memascend_jax.storage.batch import Requests, Span
from memascend_jax.storage.checksum import crc32c_many, unit_pieces
from memascend_jax.storage.engine import EngineTicket
from memascend_jax.storage.io_trace import record_transfers
from memascend_jax.storage.layout import Int64Array
from memascend_jax.storage.read_checks import expected_checksums, expected_unit_checksums, tiles_of
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.storage.ticket import Ticket
from memascend_jax.storage.tile_table import UNWRITTEN, StoredTensor, TileTable
from memascend_jax.storage.volume import Volume

#: Direct I/O into memory needs this alignment on every device in use; slots are page aligned anyway.
MEMORY_ALIGNMENT = 512
#: After this many more tickets that nobody waited for, finished ones are looked for.
_PRUNE_EVERY = 64
#: Of a large batch this much is given to the disk at a time: the checksums of the next piece are computed meanwhile.
#: The disk waits for the first piece only, so that one is small.
_FIRST_PIECE_BYTES = 4 << 20
_PIECE_BYTES = 16 << 20

Extents = list[tuple[int, int, int]]
Writes = list[tuple[StoredTensor, int, int]]
Checksums = npt.NDArray[np.uint32]


class TileIo:
    """The store's traffic. ``write_lock`` is held by who writes tiles or commits, ``lock`` guards the tile table."""

    def __init__(self, volume: Volume, table: TileTable, *, check_reads: bool) -> None:
        self.volume = volume
        self.table = table
        self.write_lock = threading.RLock()
        self.lock = threading.RLock()
        #: Called before the first write that overwrites committed data in place.
        self.before_overwrite: Callable[[], None] = lambda: None
        #: Why the store cannot be used, or written, any more.
        self.closed_reason: str | None = None
        self.write_refusal: str | None = None
        #: Whether tiles had been overwritten in place without a commit when the store was opened.
        self.found_dirty = False
        self._check_reads = check_reads
        self._serial = 0
        self._outstanding: dict[int, Ticket] = {}
        #: For a read: older reads of the same tiles that may still be in flight.
        self._earlier_reads: dict[int, set[int]] = {}
        self._prune_at = _PRUNE_EVERY

    def submit(
        self, requests: Requests, keepalive: object = None, check: bool = False, urgent: bool = False
    ) -> Ticket:
        """Starts ``requests``; see ``Batch.submit``. ``check``: compare checksums in ``wait``."""
        if not requests.writes:
            # Scratch is outside generations: it may be written while a commit waits for the disk.
            with self.lock:
                if requests.scratch_writes:
                    self.check_writable()
                return self._submit(requests, [], [], keepalive, check or self._check_reads, urgent)
        with self.write_lock:
            self.check_writable()
            self._check_writes(requests)
            # The first piece's checksums are computed before the lock is taken, those of later pieces while the
            # disk is busy with the pieces before.
            pieces = _pieces(requests.writes)
            first = self._checksums_of(pieces[0], self._is_busy()) if pieces else []
            with self.lock:
                return self._submit(requests, pieces, first, keepalive, check or self._check_reads, urgent)

    def settle(self, ticket: Ticket) -> None:
        """Waits for ``ticket`` and books its outcome; does not raise."""
        if ticket.settled:
            return
        error: Exception | None = None
        with trace.span(trace.WAIT, "for", ticket):
            for engine_ticket in ticket.engine_tickets:
                try:
                    engine_ticket.wait()
                except OSError as failure:
                    error = error or self._explained(ticket.requests, failure)
        with self.lock:
            if ticket.settled:
                return
            if trace.current is not None:
                record_transfers(trace.current, ticket.requests, ticket.engine_tickets, self.volume.paths)
            for tensor, tile, _ in ticket.requests.writes:
                if tensor.last_write[tile] == ticket.serial:
                    (tensor.poisoned.discard if error is None else tensor.poisoned.add)(tile)
            self._forget(ticket)
            if error is not None:
                ticket.fail(error)
            ticket.requests, ticket.engine_tickets = Requests(), []
            ticket.settled = True

    def settle_all(self) -> None:
        """Waits for everything in flight."""
        with self.lock:
            in_flight = list(self._outstanding.values())
        for ticket in in_flight:
            self.settle(ticket)

    def outstanding_serials(self) -> Collection[int]:
        """Returns the serials of the batches that nobody has waited for yet."""
        return self._outstanding.keys()

    def settle_tile(self, tensor: StoredTensor, tile: int) -> None:
        """Waits for what is in flight on one tile."""
        with self.lock:
            self._settle_serials({int(tensor.last_write[tile]), int(tensor.last_read[tile])})

    def check_open(self) -> None:
        """Raises ``StoreError`` when the store is closed."""
        if self.closed_reason is not None:
            raise StoreError(self.closed_reason)

    def check_writable(self) -> None:
        """Raises ``StoreError`` when the store is closed, read-only, or failed in a commit."""
        self.check_open()
        if self.write_refusal is not None:
            raise StoreError(self.write_refusal)

    def check_replaceable(self, tensor: StoredTensor, tile: int) -> None:
        """Raises ``StoreError`` when ``tile`` is committed and its tensor read-only."""
        if not tensor.layout.spec.mutable and tensor.committed[tile] != UNWRITTEN:
            raise StoreError(
                f"cannot write tensor '{tensor.name}': it was declared mutable=False and is committed; "
                "remove it and declare it again to replace it"
            )

    def explained(self, names: Sequence[str], verb: str, error: OSError) -> StoreIOError:
        """Returns ``error`` with the tensors that the failed request can have belonged to."""
        shown = ", ".join(f"'{name}'" for name in names[:3])
        what = f"tensor {shown}" if names else "scratch"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        path = self.volume.path_of(error)
        return StoreIOError(
            f"cannot {verb} {what}{more} in store '{path}': {error.args[-1]}", error.errno or 5, path
        )

    def unknown(self, name: str) -> StoreError:
        """Returns the error for a tensor that the store does not have."""
        self.check_open()
        return StoreError(
            f"no tensor '{name}' in store '{self.volume.path}' ({len(self.table.tensors):,} tensors); "
            "check the name against names()"
        )

    def _submit(
        self,
        requests: Requests,
        pieces: list[Writes],
        first_checksums: list[Checksums],
        keepalive: object,
        check: bool,
        urgent: bool,
    ) -> Ticket:
        self.check_open()
        serial = self._serial + 1
        needed = self._needed_by_writes(requests.writes)
        earlier_reads: set[int] = set()
        read_extents: Extents = []
        for tensor, span, address in requests.reads:
            self._locate_read(tensor, span, address, read_extents, needed)
            if self._outstanding and span.disk_bytes:
                earlier_reads.update(tensor.last_read[span.first_tile : span.end_tile].tolist())
        for scratch, address, nbytes, offset in requests.scratch_reads:
            scratch.locate(address, nbytes, offset, read_extents, needed, writes=False, serial=serial)
        scratch_extents: Extents = []
        for scratch, address, nbytes, offset in requests.scratch_writes:
            scratch.locate(address, nbytes, offset, scratch_extents, needed, writes=True, serial=serial)
        unit_extents = [
            self._locate_units(tensor, units, addresses, needed)
            for tensor, units, addresses in requests.unit_reads
        ]
        if self._outstanding:
            for tensor, units, _ in requests.unit_reads:
                earlier_reads.update(np.unique(tensor.last_read[tiles_of(tensor, units)]).tolist())
        reads = _checked(np.concatenate([_array(read_extents), *unit_extents]))
        scratch_writes = _checked(_array(scratch_extents))
        if any(tensor.places == 1 and tensor.committed[tile] == 0 for tensor, tile, _ in requests.writes):
            self.before_overwrite()
        self._settle_serials(needed)
        if len(self._outstanding) >= self._prune_at:
            self._prune()
        ticket = Ticket(self, serial, requests)
        if check:
            for tensor, span, address in requests.reads:
                ticket.checks += expected_checksums(tensor, span, address)
            for tensor, units, addresses in requests.unit_reads:
                ticket.checks += expected_unit_checksums(tensor, units, addresses)
        earlier_reads = {older for older in earlier_reads if self._matters(older)}
        if earlier_reads:
            self._earlier_reads[serial] = earlier_reads
        self._serial = serial
        for tensor, span, _ in requests.reads:
            tensor.last_read[span.first_tile : span.end_tile] = serial
        for tensor, units, _ in requests.unit_reads:
            tensor.last_read[tiles_of(tensor, units)] = serial
        read = functools.partial(self.volume.submit_read, urgent=urgent)
        self._start(ticket, reads, read, keepalive)
        self._start(ticket, scratch_writes, self.volume.submit_write, keepalive)
        for index, piece in enumerate(pieces):
            checksums = first_checksums
            if index:
                checksums = self._checksums_of(piece, disk_is_busy=not ticket.done())
            self._write_piece(ticket, piece, checksums, keepalive)
        self._outstanding[serial] = ticket
        return ticket

    def _needed_by_writes(self, writes: Writes) -> set[int]:
        """Returns the serials of the batches in flight that ``writes`` must not overtake."""
        if not self._outstanding:
            return set()
        needed: set[int] = set()
        needed_reads: set[int] = set()
        for tensor, tile, _ in writes:
            needed.add(int(tensor.last_write[tile]))
            # Reads in flight are of the newest contents: they matter only to a write to the same place.
            if tensor.place[tile] == tensor.write_place(tile):
                needed_reads.add(int(tensor.last_read[tile]))
        return needed | self._with_earlier_reads(needed_reads)

    def _write_piece(
        self, ticket: Ticket, piece: Writes, checksums: list[Checksums], keepalive: object
    ) -> None:
        """Makes what ``piece`` writes the newest contents, and starts writing it."""
        extents: Extents = []
        for (tensor, tile, address), values in zip(piece, checksums, strict=True):
            place = tensor.write_place(tile)
            first, _, disk_bytes = tensor.layout.disk_span(tile)
            extents.append((tensor.bases[place] + first, address, disk_bytes))
            tensor.place[tile] = place
            tensor.last_write[tile] = ticket.serial
            tensor.checksums[tensor.tile_units(tile)] = values
        self._start(ticket, _array(extents), self.volume.submit_write, keepalive)

    @staticmethod
    def _start(
        ticket: Ticket,
        extents: Int64Array,
        submit: Callable[[Int64Array, object], EngineTicket],
        keepalive: object,
    ) -> None:
        extents = extents[extents[:, 2] > 0]
        if len(extents):
            ticket.nbytes += int(extents[:, 2].sum())
            ticket.engine_tickets.append(submit(extents, keepalive))

    def _locate_read(
        self, tensor: StoredTensor, span: Span, address: int, extents: Extents, needed: set[int]
    ) -> None:
        first, end, offset, _, disk_bytes = span
        if disk_bytes == 0:
            return
        if tensor.poisoned and not tensor.poisoned.isdisjoint(range(first, end)):
            raise _lost(tensor)
        places = tensor.place[first:end]
        place = int(places[0])
        if self._outstanding:
            needed.update(tensor.last_write[first:end].tolist())
        if end - first == 1 or bool((places == place).all()):
            if place == UNWRITTEN:
                raise _unwritten(tensor, first)
            extents.append((tensor.bases[place] + offset, address, disk_bytes))
            return
        tile_bytes = tensor.layout.tile_bytes
        turns = np.flatnonzero(np.diff(places)) + first + 1
        bounds = [offset, *(turns * tile_bytes).tolist(), offset + disk_bytes]
        for begin, stop in pairwise(bounds):
            place = int(tensor.place[begin // tile_bytes])
            if place == UNWRITTEN:
                raise _unwritten(tensor, begin // tile_bytes)
            extents.append((tensor.bases[place] + begin, address + begin - offset, stop - begin))

    def _locate_units(
        self, tensor: StoredTensor, units: Int64Array, addresses: Int64Array, needed: set[int]
    ) -> Int64Array:
        """Returns the extents of scattered units."""
        unit = tensor.layout.unit_bytes or tensor.layout.block_bytes
        tiles = tiles_of(tensor, units)
        places = tensor.place[tiles]
        if (places == UNWRITTEN).any():
            raise _unwritten(tensor, int(tiles[places == UNWRITTEN][0]))
        if tensor.poisoned and not tensor.poisoned.isdisjoint(tiles.tolist()):
            raise _lost(tensor)
        if self._outstanding:
            needed.update(np.unique(tensor.last_write[tiles]).tolist())
        extents = np.empty((len(units), 3), np.int64)
        extents[:, 0] = np.array(tensor.bases, np.int64)[places] + units * unit
        extents[:, 1] = addresses
        extents[:, 2] = np.minimum(unit, tensor.layout.place_bytes - units * unit)
        return extents

    def _check_writes(self, requests: Requests) -> None:
        seen = {(id(tensor), tile) for tensor, tile, _ in requests.writes}
        if len(seen) < len(requests.writes):
            raise _written_twice(requests.writes)
        if any(address % MEMORY_ALIGNMENT for _, _, address in requests.writes):
            raise _misaligned()
        for tensor, tile, _ in requests.writes:
            if not tensor.layout.spec.mutable:
                self.check_replaceable(tensor, tile)
        for tensor, span, _ in requests.reads:
            if any((id(tensor), tile) in seen for tile in range(span.first_tile, span.end_tile)):
                raise StoreError(f"tensor '{tensor.name}' is read and written in one batch; use one for each")

    def _is_busy(self) -> bool:
        """Whether the newest batch that nobody has waited for is still on its way."""
        with self.lock:
            newest = next(reversed(self._outstanding.values()), None)
            return newest is not None and not newest.done()

    def _checksums_of(self, writes: Writes, disk_is_busy: bool) -> list[Checksums]:
        """Returns the checksums of each write, and zeroes the slots' room behind the last element.

        While the disk has something to do one thread is enough for it: the others would only share the memory's
        bandwidth, and wait for a core where the computation needs them.
        """
        addresses: list[int] = []
        lengths: list[int] = []
        counts: list[int] = []
        for tensor, tile, address in writes:
            _, nbytes, disk_bytes = tensor.layout.disk_span(tile)
            if disk_bytes > nbytes:
                ctypes.memset(address + nbytes, 0, disk_bytes - nbytes)
            if tensor.layout.unit_bytes:
                unit_addresses, unit_lengths = unit_pieces(address, nbytes, tensor.layout.unit_bytes)
                addresses += unit_addresses.tolist()
                lengths += unit_lengths.tolist()
                counts.append(len(unit_addresses))
            else:
                addresses.append(address)
                lengths.append(nbytes)
                counts.append(1)
        values = crc32c_many(
            np.array(addresses, np.int64), np.array(lengths, np.int64), one_thread=disk_is_busy
        )
        ends = np.cumsum(counts)
        return [values[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]

    def _with_earlier_reads(self, serials: set[int]) -> set[int]:
        """Returns ``serials`` and those of the reads of the same tiles that were in flight before them.

        A tile remembers its last read only; ``_earlier_reads`` has the ones before each.
        """
        found: set[int] = set()
        left = set(serials)
        while left:
            found |= left
            left = set().union(*(self._earlier_reads.get(serial, ()) for serial in left)) - found
        return found

    def _matters(self, serial: int) -> bool:
        """Whether a read is in flight, or followed one of the same tiles that still is."""
        return serial in self._outstanding or serial in self._earlier_reads

    def _forget(self, ticket: Ticket) -> None:
        """Takes a settled ticket out of the order."""
        self._outstanding.pop(ticket.serial, None)
        # Serials grow, and each entry holds smaller ones: one pass in order finds all that have lost their reason.
        for serial in sorted(self._earlier_reads):
            if not any(self._matters(older) for older in self._earlier_reads[serial]):
                del self._earlier_reads[serial]

    def _settle_serials(self, serials: set[int]) -> None:
        if self._outstanding:
            for serial in sorted(serials & self._outstanding.keys()):
                self.settle(self._outstanding[serial])

    def _prune(self) -> None:
        for ticket in list(self._outstanding.values()):
            if ticket.done():
                self.settle(ticket)
        self._prune_at = len(self._outstanding) + _PRUNE_EVERY

    def _explained(self, requests: Requests, error: OSError) -> StoreIOError:
        touched = (*requests.reads, *requests.unit_reads, *requests.writes)
        writes = requests.writes
        names = list(dict.fromkeys(entry[0].name for entry in touched))
        writing = bool(writes or requests.scratch_writes)
        return self.explained(names, "write" if writing else "read", error)


def _written_twice(writes: Writes) -> StoreError:
    counts = Counter((tensor.name, tile) for tensor, tile, _ in writes)
    (name, tile), _ = counts.most_common(1)[0]
    return StoreError(f"tile {tile} of tensor '{name}' is written twice in one batch")


def _pieces(writes: Writes) -> list[Writes]:
    """Returns ``writes`` cut into runs of about ``_PIECE_BYTES``, in order, the first run shorter."""
    pieces: list[Writes] = []
    room = 0
    for write in writes:
        if room <= 0:
            room = _PIECE_BYTES if pieces else _FIRST_PIECE_BYTES
            pieces.append([])
        pieces[-1].append(write)
        room -= write[0].layout.disk_span(write[1])[2]
    return pieces


def _array(extents: Extents) -> Int64Array:
    return np.array(extents, np.int64).reshape(-1, 3)


def _checked(extents: Int64Array) -> Int64Array:
    if (extents[:, 1] % MEMORY_ALIGNMENT).any():
        raise _misaligned()
    return extents


def _misaligned() -> StoreError:
    return StoreError(
        f"memory for direct I/O must be aligned to {MEMORY_ALIGNMENT} bytes; use slots of a PinnedArena"
    )


def _lost(tensor: StoredTensor) -> StoreError:
    return StoreError(
        f"cannot read tensor '{tensor.name}': the last write of tile {sorted(tensor.poisoned)[0]} failed; write "
        "the tile again"
    )


def _unwritten(tensor: StoredTensor, tile: int) -> StoreError:
    return StoreError(
        f"cannot read tensor '{tensor.name}': its tile {tile} of {tensor.layout.tiles} was never written"
    )
