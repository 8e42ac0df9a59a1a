# SPDX-License-Identifier: Apache-2.0
"""Parameters, masters, moments and spooled gradients on SSD, streamed through leased slots."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.state_format import itemsize
from memascend_jax.storage.tensor_store import Scratch, TensorStore, Ticket
from memascend_jax.training.model_layout import (
    GRADIENT,
    PARAMETER,
    ModelLayout,
    StagePart,
    UpdateGroup,
    UpdatePiece,
)
from memascend_jax.training.placement import LoadedGroup, flat_pieces
from memascend_jax.training.slot_classes import SPOOL, UPDATE, part_class
from memascend_jax.training.stage_schedule import StageKey
from memascend_jax.transfer import Transfer

if TYPE_CHECKING:
    import jax


class SsdPlacement:
    """Streams through ``pool`` between ``store`` and the device.

    Lifetime: owns neither store nor pool; ``close`` waits for what it has in flight. Threading: driven by one thread.
    """

    def __init__(
        self,
        layout: ModelLayout,
        store: TensorStore,
        pool: SlotPool,
        transfer: Transfer,
        clock: StepClock,
        *,
        update_depth: int,
        spool_elements: int,
    ) -> None:
        self.version = 0
        self._layout = layout
        self._store = store
        self._pool = pool
        self._transfer = transfer
        self._clock = clock
        self._update_depth = update_depth
        self._spool_elements = spool_elements
        self._commit_thread = ThreadPoolExecutor(1, thread_name_prefix="memascend-commit")
        self._committing: Future[int] | None = None
        self._spooling: deque[tuple[Ticket, Lease]] = deque()
        self._gradients: Mapping[str, Scratch] = {
            tensor.name: store.scratch(
                f"gradient/{tensor.name}", math.prod(tensor.shape) * itemsize(layout.format.grad_dtype)
            )
            for tensor in layout.tensors
        }

    def load(self, key: StageKey) -> SsdStage:
        parts = self._layout.stage_parts[key]
        dtype = self._layout.format.param_dtype
        batch = self._store.batch()
        leases = []
        for part in parts:
            nbytes = self._store.slot_bytes(math.prod(part.memory_shape), dtype)
            # Waiting here is waiting for the computation that still reads the slot.
            lease = self._pool.lease(part_class(key.kind, nbytes), label=part.tensor)
            leases.append(lease)
            batch.read(part.tensor, lease.address, part.start, part.n_elements)
        return SsdStage(self, parts, leases, batch.submit())

    def read_rows(self, tensor: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        columns = self._layout.shape_of(tensor)[1]
        out = np.empty((len(rows), columns), to_dtype(self._layout.format.param_dtype))
        with self._clock.span("ssd_read_wait"):
            self._store.read_rows(tensor, rows, out)
        return out

    def spool(self, tensor: str, start: int, gradient: jax.Array, n_elements: int) -> None:
        size = itemsize(self._layout.format.grad_dtype)
        scratch = self._gradients[tensor]
        gradient.block_until_ready()
        for offset, n in flat_pieces(n_elements, self._spool_elements):
            with self._clock.span("ssd_write_wait"):
                lease = self._lease_spool_slot()
            with self._clock.span("device_to_host"):
                self._transfer.copy_out(gradient, lease.address, offset * size, n * size)
            batch = self._store.batch()
            scratch.write(lease.address, n * size, (start + offset) * size, batch)
            self._spooling.append((batch.submit(), lease))

    def update(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        # What the last committed generation does not use may only be overwritten once a newer one is committed.
        self.finish_commit()
        with self._clock.span("ssd_write_wait"):
            while self._spooling:
                self._reap_spool()
        reading: deque[tuple[UpdateGroup, Lease, Ticket]] = deque()
        writing: deque[tuple[Ticket, Lease]] = deque()
        try:
            self._update_groups(skip_gradient, apply, reading, writing)
        finally:
            # After a failure the kernel may still be using these slots: wait before they are lent again.
            for ticket, lease in [*((ticket, lease) for _, lease, ticket in reading), *writing]:
                lease.defer(ticket)
                lease.release()
        self.version += 1

    def _update_groups(
        self,
        skip_gradient: frozenset[str],
        apply: Callable[[LoadedGroup], None],
        reading: deque[tuple[UpdateGroup, Lease, Ticket]],
        writing: deque[tuple[Ticket, Lease]],
    ) -> None:
        upcoming = iter(self._layout.update_groups)
        exhausted = False
        while True:
            # Half of the slots read ahead, the others are computed on or being written.
            while not exhausted and len(reading) < max(1, self._update_depth // 2):
                group = next(upcoming, None)
                if group is None:
                    exhausted = True
                    break
                with self._clock.span("ssd_write_wait"):
                    while len(writing) + len(reading) >= self._update_depth:
                        _reap(writing)
                    lease = self._pool.lease(UPDATE)
                reading.append((group, lease, self._read_group(group, lease, skip_gradient)))
            if not reading:
                break
            group, lease, ticket = reading[0]
            with self._clock.span("ssd_read_wait"):
                ticket.wait()
            with self._clock.span("optimizer"):
                apply(self._loaded_group(group, lease, skip_gradient))
                written = self._write_group(group, lease)
            reading.popleft()
            writing.append((written, lease))
        with self._clock.span("ssd_write_wait"):
            while writing:
                _reap(writing)

    def write(self, tensor: str, start: int, values: NDArray[Any]) -> None:
        self.finish_commit()
        self._store.write_elements(tensor, start, values)

    def read(self, tensor: str, start: int, n_elements: int) -> NDArray[Any]:
        return self._store.read_elements(tensor, start, n_elements)

    def begin_commit(self, run_state: bytes) -> None:
        self.finish_commit()
        # The disk's flush takes long; the next step's forward only reads, so it need not wait for it.
        self._committing = self._commit_thread.submit(self._store.commit, run_state)

    def finish_commit(self) -> None:
        committing, self._committing = self._committing, None
        if committing is not None:
            with self._clock.span("commit"):
                committing.result()

    def io_bytes(self) -> tuple[int, int]:
        counters = self._store.counters()
        return counters.read_bytes, counters.write_bytes

    def close(self) -> None:
        try:
            self.finish_commit()
        finally:
            self._commit_thread.shutdown()
            while self._spooling:
                self._reap_spool()

    def _lease_spool_slot(self) -> Lease:
        while self._spooling and self._spooling[0][0].done():
            self._reap_spool()
        if self._spooling and self._pool.free_count(SPOOL) == 0:
            self._reap_spool()
        return self._pool.lease(SPOOL)

    def _reap_spool(self) -> None:
        _reap(self._spooling)

    def _read_group(self, group: UpdateGroup, lease: Lease, skip_gradient: frozenset[str]) -> Ticket:
        fmt, size = self._layout.format, itemsize(self._layout.format.grad_dtype)
        batch = self._store.batch()
        for piece in group.pieces:
            address = lease.address
            if not fmt.has_master:
                batch.read(piece.tensor, address + piece.offsets[PARAMETER], piece.start, piece.n_elements)
            for leaf, _ in fmt.leaves:
                batch.read(piece.tensor + leaf, address + piece.offsets[leaf], piece.start, piece.n_elements)
            if piece.tensor not in skip_gradient:
                self._gradients[piece.tensor].read(
                    address + piece.offsets[GRADIENT], piece.n_elements * size, piece.start * size, batch
                )
        return batch.submit()

    def _write_group(self, group: UpdateGroup, lease: Lease) -> Ticket:
        batch = self._store.batch()
        for piece in group.pieces:
            batch.write_tile(piece.tensor, piece.tile, lease.address + piece.offsets[PARAMETER])
            for leaf, _ in self._layout.format.leaves:
                batch.write_tile(piece.tensor + leaf, piece.tile, lease.address + piece.offsets[leaf])
        return batch.submit()

    def _loaded_group(self, group: UpdateGroup, lease: Lease, skip_gradient: frozenset[str]) -> LoadedGroup:
        dtypes = dict(self._layout.format.leaves)
        dtypes[GRADIENT] = self._layout.format.grad_dtype
        dtypes[PARAMETER] = self._layout.format.param_dtype

        def view(piece: UpdatePiece, leaf: str) -> NDArray[Any]:
            return lease.view(to_dtype(dtypes[leaf]), (piece.n_elements,), piece.offsets[leaf])

        for piece in group.pieces:
            if piece.tensor in skip_gradient:
                view(piece, GRADIENT).view(np.uint8)[:] = 0
        return LoadedGroup(group, lambda piece, leaf: lease.address + piece.offsets[leaf], view)


class SsdStage:
    """A stage being read into leased slots."""

    def __init__(
        self, owner: SsdPlacement, parts: tuple[StagePart, ...], leases: list[Lease], ticket: Ticket
    ) -> None:
        self.version = owner.version
        self._owner = owner
        self._parts = parts
        self._leases = leases
        self._ticket: Ticket | None = ticket
        self._arrays: dict[str, jax.Array] | None = None

    def arrays(self) -> dict[str, jax.Array]:
        self._wait()
        if self._arrays is None:
            dtype = self._owner._layout.format.param_dtype
            with self._owner._clock.span("host_to_device"):
                self._arrays = {
                    part.local_name: self._owner._transfer.to_device(lease, dtype, part.memory_shape)
                    for part, lease in zip(self._parts, self._leases, strict=True)
                }
        return self._arrays

    def release(self) -> None:
        # The kernel may still be writing into the slots of a stage that was dropped unused.
        self._wait()
        self._arrays = None
        for lease in self._leases:
            lease.release()

    def _wait(self) -> None:
        if self._ticket is not None:
            with self._owner._clock.span("ssd_read_wait"):
                self._ticket.wait()
            self._ticket = None


def _reap(queue: deque[tuple[Ticket, Lease]]) -> None:
    queue[0][0].wait()
    queue.popleft()[1].release()
