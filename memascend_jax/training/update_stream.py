# SPDX-License-Identifier: Apache-2.0
"""The update of a step on its own thread: tiles stream from SSD through the optimizer and back, in forward order.

The next step's forward runs meanwhile and receives each updated parameter from memory. A group of tiles is updated
once the forward has asked for its stage, so that no parameter has to be read back; ``finish`` lets the rest go ahead
without a reader. Source of the order: the overlapped optimizer step of ZeRO-Infinity (arXiv 2104.07857), moved from
the backward to the next forward because a clip needs the norm of all gradients first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import RunError
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.observe import trace
from memascend_jax.optim.state_format import itemsize
from memascend_jax.storage.engine import address_of
from memascend_jax.storage.tensor_store import Scratch, TensorStore, Ticket
from memascend_jax.training.host_state import HostState
from memascend_jax.training.model_layout import (
    GRADIENT,
    PARAMETER,
    ModelLayout,
    StagePart,
    UpdateGroup,
    UpdatePiece,
)
from memascend_jax.training.placement import LoadedGroup
from memascend_jax.training.slot_classes import UPDATE


@dataclass(slots=True)
class Reception:
    """Elements ``[start, end)`` of a tensor that go to ``address`` as they are updated; ``missing`` are to come."""

    tensor: str
    start: int
    end: int
    address: int
    missing: int


class _Work(NamedTuple):
    """A group to update; ``early`` ones wait for no reader."""

    number: int
    apply: Callable[[LoadedGroup], None]
    skip_gradient: frozenset[str]
    early: bool


class _Reading(NamedTuple):
    """A group whose missing parts are being read; ``leased`` slots go back when it is written."""

    work: _Work
    group: UpdateGroup
    lease: Lease
    ticket: Ticket
    leased: bool


class UpdateStream:
    """Runs one update at a time and hands its parameters over.

    Threading: the update runs on ``executor``, everything else is called by the thread that drives the step.
    """

    def __init__(
        self,
        layout: ModelLayout,
        store: TensorStore,
        pool: SlotPool,
        gradients: Mapping[str, Scratch],
        host: HostState,
        executor: Executor,
        *,
        depth: int,
    ) -> None:
        self._layout = layout
        self._store = store
        self._pool = pool
        self._gradients = gradients
        self._host = host
        self._executor = executor
        self._depth = depth
        self._sizes = {tensor.name: tensor.elements for tensor in layout.trained}
        self._streamed = {part.tensor for parts in layout.stage_parts.values() for part in parts}
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._running: Future[None] | None = None
        self._updated: dict[str, int] = {}
        self._receptions: list[Reception] = []
        self._draining = self._abandoned = self._handing_over = False
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._left: list[int] = []

    def start(self) -> Future[None]:
        """Starts an update, which takes the groups of ``add`` and ends after ``add_rest``; the one before is finished.

        Until ``add_rest`` stages are read as they were before the update. Returns what ends with the update.
        """
        self._updated = dict.fromkeys(self._sizes, 0)
        self._draining = self._handing_over = False
        self._queue = SimpleQueue()
        self._left = list(range(len(self._layout.update_groups)))
        self._running = self._executor.submit(self._run, self._queue)
        self._running.add_done_callback(self._wake)
        return self._running

    def add(self, index: int, apply: Callable[[LoadedGroup], None]) -> None:
        """Gives a group, whose gradients are in host memory, to the update; no stage has to ask for it."""
        self._left.remove(index)
        self._queue.put(_Work(index, apply, frozenset(), early=True))

    def add_rest(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        """Gives all other groups to the update; from now on stages are of the new version."""
        with self._changed:
            self._handing_over = True
        for index in self._left:
            self._queue.put(_Work(index, apply, skip_gradient, early=False))
        self._queue.put(None)

    def receive(
        self, parts: Sequence[StagePart], addresses: Sequence[int]
    ) -> tuple[list[int], list[Reception]]:
        """Asks for the parameters of a stage.

        Returns:
            For each part how many elements, from its start, are to be read from the store because the running update
            is through with them or does not touch them, and the receptions of the others: ``wait`` for them.
        """
        with self._changed:
            if self._running is None or not self._handing_over:
                return [part.n_elements for part in parts], []
            readable, receptions = [], []
            for part, address in zip(parts, addresses, strict=True):
                end = part.start + part.n_elements
                start = min(max(part.start, self._updated.get(part.tensor, end)), end)
                readable.append(start - part.start)
                if start < end:
                    begin = address + (start - part.start) * itemsize(self._layout.format.param_dtype)
                    receptions.append(Reception(part.tensor, start, end, begin, end - start))
            self._receptions += receptions
            self._changed.notify_all()
            return readable, receptions

    def wait(self, receptions: Sequence[Reception]) -> None:
        """Waits until all of ``receptions`` are there; raises what the update failed with."""
        with self._changed:
            running = self._running
            self._changed.wait_for(
                lambda: (
                    all(reception.missing == 0 for reception in receptions)
                    or running is None
                    or running.done()
                )
            )
        if any(reception.missing for reception in receptions):
            if running is not None:
                running.result()
            raise RunError(f"the update ended without the parameters of {receptions[0].tensor}")

    def cancel(self, receptions: Sequence[Reception]) -> None:
        """Gives up receptions: their memory is not written to afterwards."""
        with self._changed:
            self._receptions = [known for known in self._receptions if known not in receptions]

    def wait_consumed(self, tensor: str) -> None:
        """Waits until the running update has read the whole gradient of ``tensor``."""
        with self._changed:
            running = self._running
            if running is not None and self._handing_over:
                self._changed.wait_for(lambda: self._updated[tensor] == self._sizes[tensor] or running.done())

    def check(self) -> None:
        """Raises what the running update failed with, if it has; waits for nothing."""
        if self._running is not None and self._running.done():
            self._running.result()

    def finish(self) -> None:
        """Waits for the end of the running update, which needs no reader from now on; raises what it failed with."""
        with self._changed:
            running, self._draining = self._running, True
            self._changed.notify_all()
        if running is not None:
            running.result()
            with self._changed:
                self._running = None

    def abandon(self) -> None:
        """Ends the running update at its next group. The store then holds an uncommitted mixture."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        # It may be waiting for a group.
        self._queue.put(None)

    def give_up(self) -> None:
        """Abandons the running update and waits for its end; another one may not be started."""
        self.abandon()
        if self._running is not None:
            wait([self._running])
            self._running = None

    def _run(self, queue: SimpleQueue[_Work | None]) -> None:
        reading: deque[_Reading] = deque()
        writing: deque[tuple[Ticket, Lease]] = deque()
        try:
            with trace.span(trace.PHASE, "update"):
                self._stream(queue, reading, writing)
        except BaseException:
            self._host.detach_all()
            raise
        finally:
            # After a failure the kernel may still be using these slots: wait before they are lent again.
            for ticket, lease in [*((item.ticket, item.lease) for item in reading if item.leased), *writing]:
                lease.defer(ticket)
                lease.release()

    def _stream(
        self,
        queue: SimpleQueue[_Work | None],
        reading: deque[_Reading],
        writing: deque[tuple[Ticket, Lease]],
    ) -> None:
        staying: list[Ticket] = []
        ended = False
        while True:
            # Half of the slots are read ahead or computed on, the others are being written. Of three, one reads ahead.
            while not ended and sum(item.leased for item in reading) < (self._depth + 1) // 2:
                try:
                    work = queue.get(block=not reading)
                except Empty:
                    break
                if work is None:
                    ended = True
                else:
                    reading.append(self._begin(work, reading, writing))
            if self._abandoned:
                raise RunError("the update was given up")
            if not reading:
                break
            item = reading[0]
            item.ticket.wait()
            with trace.span(trace.WAIT, "for the stage of", item.group):
                self._wait_for_reader(item)
            item.work.apply(self._loaded(item))
            written = self._write(item)
            reading.popleft()
            if item.leased:
                writing.append((written, item.lease))
            else:
                staying.append(written)
            # From now on a stage reads these tiles from the store, which waits for the write.
            self._hand_over(item)
            if item.work.early:
                self._host.detach(item.work.number)
        while writing:
            reap(writing)
        for ticket in staying:
            ticket.wait()

    def _begin(self, work: _Work, reading: deque[_Reading], writing: deque[tuple[Ticket, Lease]]) -> _Reading:
        """Starts reading what is not in memory of a group, into its own slot or a leased one."""
        group = self._layout.update_groups[work.number]
        own = self._host.slot(work.number)
        if own is not None:
            ticket = self._read(group, own, work.skip_gradient, state=work.number not in self._host.current)
            self._host.current.add(work.number)
            return _Reading(work, group, own, ticket, leased=False)
        while len(writing) + sum(item.leased for item in reading) >= self._depth:
            reap(writing)
        lease = self._pool.lease(UPDATE)
        ticket = self._read(group, lease, work.skip_gradient, state=True)
        return _Reading(work, group, lease, ticket, leased=True)

    def _wait_for_reader(self, item: _Reading) -> None:
        """Waits until the stage of a group is asked for; an early one, and what no stage reads, goes on at once."""
        with self._changed:
            if not item.work.early and item.group.pieces[0].tensor in self._streamed:
                self._changed.wait_for(
                    lambda: (
                        self._draining
                        or self._abandoned
                        or any(
                            _overlap(known, piece)
                            for known in self._receptions
                            for piece in item.group.pieces
                        )
                    )
                )
            if self._abandoned:
                raise RunError("the update was given up")

    def _hand_over(self, item: _Reading) -> None:
        """Copies the group's new parameters to whoever waits for them, and books the group."""
        size = itemsize(self._layout.format.param_dtype)
        with self._changed:
            for piece in item.group.pieces:
                source = item.lease.address + piece.offsets[PARAMETER]
                for known in self._receptions:
                    start, n = _span(known, piece)
                    if n > 0:
                        target = known.address + (start - known.start) * size
                        _core.copy(target, source + (start - piece.start) * size, n * size)
                        known.missing -= n
                self._updated[piece.tensor] = piece.start + piece.n_elements
            self._receptions = [known for known in self._receptions if known.missing]
            self._changed.notify_all()

    def _wake(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _read(
        self, group: UpdateGroup, lease: Lease, skip_gradient: frozenset[str], *, state: bool
    ) -> Ticket:
        fmt, size = self._layout.format, itemsize(self._layout.format.grad_dtype)
        batch = self._store.batch()
        for piece in group.pieces:
            address = lease.address
            if state and not fmt.has_master:
                batch.read(piece.tensor, address + piece.offsets[PARAMETER], piece.start, piece.n_elements)
            for leaf in fmt.leaves if state else ():
                start, n = self._layout.leaf_span(piece, leaf.suffix)
                batch.read(piece.tensor + leaf.suffix, address + piece.offsets[leaf.suffix], start, n)
            if piece.tensor not in skip_gradient and self._host.gradient_view(piece) is None:
                self._gradients[piece.tensor].read(
                    address + piece.offsets[GRADIENT], piece.n_elements * size, piece.start * size, batch
                )
        return batch.submit()

    def _write(self, item: _Reading) -> Ticket:
        batch = self._store.batch()
        for piece in item.group.pieces:
            batch.write_tile(piece.tensor, piece.tile, item.lease.address + piece.offsets[PARAMETER])
            for leaf in self._layout.format.leaves:
                address = item.lease.address + piece.offsets[leaf.suffix]
                batch.write_tile(piece.tensor + leaf.suffix, piece.tile, address)
        return batch.submit()

    def _loaded(self, item: _Reading) -> LoadedGroup:
        def view(piece: UpdatePiece, leaf: str) -> NDArray[Any]:
            kept = self._host.gradient_view(piece) if leaf == GRADIENT else None
            if kept is not None:
                return kept
            dtype = to_dtype(self._layout.leaf_dtype(leaf))
            _, n = self._layout.leaf_span(piece, leaf)
            return item.lease.view(dtype, (n,), piece.offsets[leaf])

        for piece in item.group.pieces:
            if piece.tensor in item.work.skip_gradient:
                view(piece, GRADIENT).view(np.uint8)[:] = 0
        return LoadedGroup(item.group, lambda piece, leaf: address_of(view(piece, leaf)), view)


def reap(queue: deque[tuple[Ticket, Lease]]) -> None:
    """Waits for the oldest transfer of ``queue`` and gives its slot back."""
    queue[0][0].wait()
    queue.popleft()[1].release()


def _span(reception: Reception, piece: UpdatePiece) -> tuple[int, int]:
    """Returns ``(start, n)`` of the elements that both have; ``n`` is at most 0 when they have none."""
    if reception.tensor != piece.tensor:
        return 0, 0
    start = max(reception.start, piece.start)
    return start, min(reception.end, piece.start + piece.n_elements) - start


def _overlap(reception: Reception, piece: UpdatePiece) -> bool:
    return _span(reception, piece)[1] > 0
