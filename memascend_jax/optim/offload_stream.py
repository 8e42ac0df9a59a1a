# SPDX-License-Identifier: Apache-2.0
"""The state on its way: groups of pieces from the store into slots, through an update, and back, in order.

With two slots a group is read while the one before is updated or written; a third would hardly be faster, as the disk
has to do both either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.optim.offload_layout import PARAMETER, Group, Piece, Region
from memascend_jax.storage.tensor_store import TensorStore, Ticket

#: Updates one piece whose regions are in the slot, in place.
Work = Callable[[Piece, Lease | None], None]


class _Reading(NamedTuple):
    group: Group
    lease: Lease | None
    ticket: Ticket | None


class StateStream:
    """Moves the groups of one layout between a store and the slots of a pool."""

    def __init__(self, store: TensorStore, pool: SlotPool, groups: Sequence[Group]) -> None:
        self._store = store
        self._pool = pool
        self._groups = groups
        #: Whether the last run has begun to write.
        self.wrote = False

    def run(self, work: Work, *, reads: bool = True, writes_params: bool = False) -> None:
        """Gives every piece to ``work``, then writes what it has changed; returns when all is written.

        After a failure nothing is in flight any more; the store then holds a mixture that is not committed.

        Args:
            reads: False: the slots come as they are, and everything in them is written.
            writes_params: whether parameters in the store are written.

        Raises:
            OSError: the disk failed. Whatever ``work`` raises is passed on.
        """
        self.wrote = False
        reading: deque[_Reading] = deque()
        writing: list[Ticket] = []
        waiting = deque(self._groups)
        try:
            while waiting or reading:
                if not reading:
                    reading.append(self._begin(waiting.popleft(), reads))
                # Another group is read during this one's update where a slot is free for it.
                if waiting and len(reading) == 1 and self._has_room(waiting[0]):
                    reading.append(self._begin(waiting.popleft(), reads))
                current = reading[0]
                if current.ticket is not None:
                    current.ticket.wait()
                for piece in current.group.pieces:
                    work(piece, current.lease)
                written = self._write(current, reads, writes_params)
                reading.popleft()
                _give_back(current.lease, written)
                writing = [ticket for ticket in writing if not ticket.done()]
                if written is not None:
                    writing.append(written)
            for ticket in writing:
                ticket.wait()
        except BaseException:
            for item in reading:
                _give_back(item.lease, item.ticket)
            self._settle([*(item.ticket for item in reading), *writing])
            raise

    def _begin(self, group: Group, reads: bool) -> _Reading:
        """Leases a slot, which waits for an older group's write, and starts reading into it."""
        regions = [region for piece in group.pieces for region in piece.regions]
        if not regions:
            return _Reading(group, None, None)
        lease = self._pool.lease(group.size_class, label=str(group))
        wanted = [region for region in regions if region.reads]
        if not reads or not wanted:
            return _Reading(group, lease, None)
        try:
            batch = self._store.batch()
            for region in wanted:
                batch.read(region.tensor, lease.address + region.offset, region.start, region.n_elements)
            return _Reading(group, lease, batch.submit())
        except BaseException:
            lease.release()
            raise

    def _has_room(self, group: Group) -> bool:
        slots = self._pool.classes.get(group.size_class)
        if slots is None or not any(piece.regions for piece in group.pieces):
            return False
        return self._pool.free_count(group.size_class) > 0

    def _write(self, item: _Reading, reads: bool, writes_params: bool) -> Ticket | None:
        if item.lease is None:
            return None
        batch, anything = self._store.batch(), False
        for piece in item.group.pieces:
            for region in piece.regions:
                if _is_written(region, reads, writes_params):
                    anything = True
                    for tile, offset in region.tiles:
                        batch.write_tile(region.tensor, tile, item.lease.address + region.offset + offset)
        if not anything:
            return None
        self.wrote = True
        return batch.submit()

    @staticmethod
    def _settle(tickets: Sequence[Ticket | None]) -> None:
        """Lets end what a failure has left on its way; its own failure would only hide the first one."""
        for ticket in tickets:
            if ticket is not None:
                try:
                    ticket.wait()
                except Exception:
                    continue


def _is_written(region: Region, reads: bool, writes_params: bool) -> bool:
    if region.state == PARAMETER:
        return writes_params
    return region.writes or not reads


def _give_back(lease: Lease | None, ticket: Ticket | None) -> None:
    if lease is not None:
        if ticket is not None:
            lease.defer(ticket)
        lease.release()
