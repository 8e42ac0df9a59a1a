# SPDX-License-Identifier: Apache-2.0
"""The whole training state, group by group, through the slots that an update uses: for checkpoints.

No memory but the update's own slots is used, which nobody else has between steps. One group is read or written while
another is worked on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.storage.engine import address_of
from memascend_jax.storage.tensor_store import TensorStore, Ticket
from memascend_jax.training.model_layout import PARAMETER, ModelLayout, UpdateGroup, leaf_name
from memascend_jax.training.placement import Fill, LoadedGroup, Visit
from memascend_jax.training.slot_classes import UPDATE


def visit_stored(layout: ModelLayout, store: TensorStore, pool: SlotPool, depth: int, visit: Visit) -> None:
    """Reads the groups from ``store``, in order, and shows each to ``visit``; at most ``depth`` slots are leased."""
    reading: deque[tuple[Ticket, Lease, UpdateGroup]] = deque()
    visited: deque[tuple[Sequence[Future[None]], Lease]] = deque()

    def visit_oldest() -> None:
        ticket, lease, group = reading[0]
        ticket.wait()
        futures = visit(_in_slot(layout, group, lease))
        reading.popleft()
        visited.append((futures, lease))

    def let_oldest_go() -> None:
        for future in visited[0][0]:
            future.result()
        visited.popleft()[1].release()

    try:
        for group in layout.update_groups:
            if len(reading) >= max(1, depth // 2):
                visit_oldest()
            while len(reading) + len(visited) >= depth:
                let_oldest_go() if visited else visit_oldest()
            lease = pool.lease(UPDATE, label=f"state of {group}")
            batch = store.batch()
            for piece in group.pieces:
                for leaf in _leaves(layout):
                    start, n = layout.leaf_span(piece, leaf)
                    batch.read(leaf_name(piece.tensor, leaf), lease.address + piece.offsets[leaf], start, n)
            reading.append((batch.submit(), lease, group))
        while reading:
            visit_oldest()
        while visited:
            let_oldest_go()
    finally:
        # After a failure kernel and threads may still be using these slots.
        for ticket, lease, _ in reading:
            lease.defer(ticket)
            lease.release()
        for futures, lease in visited:
            wait(futures)
            lease.release()


def fill_stored(layout: ModelLayout, store: TensorStore, pool: SlotPool, depth: int, fill: Fill) -> None:
    """Lets ``fill`` make every group, in order, and writes it to ``store``; at most ``depth`` slots are leased."""
    filling: deque[tuple[Sequence[Future[None]], Lease, UpdateGroup]] = deque()
    writing: deque[tuple[Ticket, Lease]] = deque()

    def write_oldest() -> None:
        futures, lease, group = filling[0]
        for future in futures:
            future.result()
        fill.finish(_in_slot(layout, group, lease))
        batch = store.batch()
        for piece in group.pieces:
            for leaf in _leaves(layout):
                address = lease.address + piece.offsets[leaf]
                batch.write_tile(leaf_name(piece.tensor, leaf), piece.tile, address)
        ticket = batch.submit()
        filling.popleft()
        writing.append((ticket, lease))

    def let_oldest_go() -> None:
        writing[0][0].wait()
        writing.popleft()[1].release()

    try:
        for group in layout.update_groups:
            if len(filling) >= max(1, depth // 2):
                write_oldest()
            while len(filling) + len(writing) >= depth:
                let_oldest_go() if writing else write_oldest()
            lease = pool.lease(UPDATE, label=f"state of {group}")
            filling.append((fill.begin(_in_slot(layout, group, lease)), lease, group))
        while filling:
            write_oldest()
        while writing:
            let_oldest_go()
    finally:
        for futures, lease, _ in filling:
            wait(futures)
            lease.release()
        for ticket, lease in writing:
            lease.defer(ticket)
            lease.release()


def visit_all(groups: Iterable[LoadedGroup], visit: Visit) -> None:
    """Shows groups that are in memory anyway to ``visit``."""
    for futures in [visit(loaded) for loaded in groups]:
        for future in futures:
            future.result()


def fill_all(groups: Iterable[LoadedGroup], fill: Fill) -> None:
    """Lets ``fill`` make groups where they stay."""
    for loaded in groups:
        for future in fill.begin(loaded):
            future.result()
        fill.finish(loaded)


def _leaves(layout: ModelLayout) -> list[str]:
    return [PARAMETER, *(leaf.suffix for leaf in layout.format.leaves)]


def _in_slot(layout: ModelLayout, group: UpdateGroup, lease: Lease) -> LoadedGroup:
    def view(piece: Any, leaf: str) -> Any:
        _, n = layout.leaf_span(piece, leaf)
        return lease.view(to_dtype(layout.leaf_dtype(leaf)), (n,), piece.offsets[leaf])

    return LoadedGroup(group, lambda piece, leaf: address_of(view(piece, leaf)), view)
