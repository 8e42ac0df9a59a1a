# SPDX-License-Identifier: Apache-2.0
"""Scratch extents: space of the store outside all generations, for data that a crash may lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memascend_jax.errors import StoreError
from memascend_jax.storage.batch import Batch
from memascend_jax.storage.whole_number import ANY_SIZE, whole_number
from memascend_jax.units import round_up

if TYPE_CHECKING:
    from memascend_jax.storage.ticket import Ticket
    from memascend_jax.storage.tile_io import Extents, TileIo


class Scratch:
    """``nbytes`` of the store under a name, readable and writable at multiples of the block.

    Its contents are not checksummed, not committed, and gone when the store is closed. A read of what an earlier
    batch is still writing waits for it, and the other way round; within one batch there is no order. A failed write
    is raised by the ticket's ``wait`` and nowhere else.
    """

    def __init__(self, io: TileIo, name: str, address: int, nbytes: int, block_bytes: int) -> None:
        self._io = io
        self._address = address
        self._block_bytes = block_bytes
        self.name = name
        self.nbytes = nbytes
        #: (serial, begin, end, writes) of what may still be in flight.
        self._in_flight: list[tuple[int, int, int, bool]] = []

    def write(self, address: int, nbytes: int, offset: int = 0, batch: Batch | None = None) -> Ticket | None:
        """Writes ``nbytes``, rounded up to the block, from ``address`` to ``offset``.

        Returns:
            The ticket, or None when the write was added to ``batch`` instead.

        Raises:
            StoreError: outside the extent, or ``offset`` is not a multiple of the block.
        """
        target = Batch(self._io) if batch is None else batch
        target.scratch_write(self, address, nbytes, offset)
        return target.submit() if batch is None else None

    def read(self, address: int, nbytes: int, offset: int = 0, batch: Batch | None = None) -> Ticket | None:
        """Reads ``nbytes``, rounded up to the block, from ``offset`` to ``address``; see ``write``."""
        target = Batch(self._io) if batch is None else batch
        target.scratch_read(self, address, nbytes, offset)
        return target.submit() if batch is None else None

    def locate(
        self,
        address: int,
        nbytes: int,
        offset: int,
        extents: Extents,
        needed: set[int],
        *,
        writes: bool,
        serial: int,
    ) -> None:
        """Adds the extent of one request and the serials of older ones that it must wait for."""
        nbytes = whole_number(nbytes, f"the bytes to move of scratch '{self.name}'", ANY_SIZE)
        offset = whole_number(offset, f"the offset in scratch '{self.name}'", ANY_SIZE)
        disk_bytes = round_up(nbytes, self._block_bytes)
        if nbytes < 0 or offset < 0 or offset % self._block_bytes or offset + disk_bytes > self.nbytes:
            raise StoreError(
                f"scratch '{self.name}' holds {self.nbytes:,} bytes in blocks of {self._block_bytes:,}; "
                f"[{offset:,}, {offset + nbytes:,}) is outside it or misaligned"
            )
        if disk_bytes == 0:
            return
        outstanding = self._io.outstanding_serials()
        self._in_flight = [
            entry for entry in self._in_flight if entry[0] in outstanding or entry[0] == serial
        ]
        end = offset + disk_bytes
        for older, begin, stop, wrote in self._in_flight:
            if begin < end and offset < stop and (writes or wrote) and older != serial:
                needed.add(older)
        self._in_flight.append((serial, offset, end, writes))
        extents.append((self._address + offset, address, disk_bytes))

    def places(self) -> list[tuple[str, int, int]]:
        """Returns (path, offset, bytes) of the part on each member that holds one."""
        extent = np.array([[self._address, 0, self.nbytes]], np.int64)
        segments = self._io.volume.striping.segments(extent)
        found = []
        for member in np.unique(segments[:, 0]).tolist():
            part = segments[segments[:, 0] == member]
            path = self._io.volume.members[member].path
            found.append((path, int(part[:, 1].min()), int(part[:, 3].sum())))
        return found

    @property
    def extent(self) -> tuple[int, int]:
        """(address in the store, bytes)."""
        return self._address, self.nbytes
