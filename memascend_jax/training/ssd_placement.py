# SPDX-License-Identifier: Apache-2.0
"""Parameters, masters, moments and spooled gradients on SSD, streamed through leased slots."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.observe import trace
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.state_format import itemsize
from memascend_jax.storage.tensor_store import Scratch, TensorStore, Ticket
from memascend_jax.training.host_state import HostState
from memascend_jax.training.model_layout import PARAMETER, ModelLayout, StagePart, leaf_name
from memascend_jax.training.placement import Fill, LoadedGroup, Visit
from memascend_jax.training.residency import Residency, early_tensors
from memascend_jax.training.slot_classes import SPOOL, part_class
from memascend_jax.training.stage_schedule import StageKey
from memascend_jax.training.state_groups import fill_stored, visit_stored
from memascend_jax.training.update_stream import Reception, UpdateStream, reap
from memascend_jax.transfer import Transfer

if TYPE_CHECKING:
    import jax


class SsdPlacement:
    """Streams through ``pool`` between ``store`` and the device.

    An update runs on a thread of its own beside the next step's forward, its commit after it on the same thread.

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
        residency: Residency,
    ) -> None:
        self.version = 0
        self.overlaps_update = True
        self._layout = layout
        self._store = store
        self._pool = pool
        self._transfer = transfer
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memascend-update")
        self._updating: Future[None] | None = None
        #: The update of groups in the backward, while there is one.
        self._early: Callable[[LoadedGroup], None] | None = None
        self._committing: Future[None] | None = None
        self._spooling: deque[tuple[Ticket, Lease]] = deque()
        self._gradients: Mapping[str, Scratch] = {
            tensor.name: store.scratch(
                f"gradient/{tensor.name}", math.prod(tensor.shape) * itemsize(layout.format.grad_dtype)
            )
            for tensor in layout.trained
        }
        self._update_depth = update_depth
        self._host = HostState(layout, pool, residency)
        self._early_tensors = early_tensors(layout)
        self._update = UpdateStream(
            layout, store, pool, self._gradients, self._host, self._thread, depth=update_depth
        )

    def load(self, key: StageKey) -> SsdStage:
        return SsdStage(self, key.kind, self._layout.stage_parts[key])

    def lease(self, kind: str, part: StagePart) -> Lease:
        """Returns a slot for a part of a stage; waits for the computation that still reads it."""
        nbytes = self._store.slot_bytes(math.prod(part.memory_shape), self._layout.format.param_dtype)
        return self._pool.lease(part_class(kind, nbytes), label=part.tensor)

    def begin_read(
        self, parts: Sequence[StagePart], leases: Sequence[Lease]
    ) -> tuple[Ticket, list[Reception]]:
        """Starts reading parts, or asks the running update for them."""
        batch = self._store.batch()
        readable, receptions = self._update.receive(parts, [lease.address for lease in leases])
        for part, lease, n_elements in zip(parts, leases, readable, strict=True):
            if n_elements:
                batch.read(part.tensor, lease.address, part.start, n_elements)
        return batch.submit(), receptions

    def read_rows(self, tensor: str, rows: NDArray[np.int64], leaf: str = PARAMETER) -> NDArray[Any]:
        columns = self._layout.leaf_shape(tensor, leaf)[1]
        out = np.empty((len(rows), columns), to_dtype(self._layout.leaf_dtype(leaf)))
        if self._early is None and self._layout.is_trained(tensor):
            self.finish_update()
        with self._clock.span("ssd_read_wait"):
            self._store.read_rows(leaf_name(tensor, leaf), rows, out)
        return out

    def spool(self, tensor: str, start: int, gradient: jax.Array, n_elements: int) -> None:
        size = itemsize(self._layout.format.grad_dtype)
        scratch = self._gradients[tensor]
        with self._clock.span("optimizer"):
            self._update.wait_consumed(tensor)
        with trace.span(trace.WAIT, "for the gradient of", tensor):
            gradient.block_until_ready()
        if self._early is not None and tensor in self._early_tensors:
            with self._clock.span("optimizer"):
                for index in self._host.groups_of([tensor]):
                    # After a failure no slot comes back: it would be waited for in vain.
                    self._update.check()
                    self._host.attach(index)
        for run in self._host.runs(tensor, start, n_elements):
            lease = None
            if run.address is None:
                with self._clock.span("ssd_write_wait"):
                    lease = self._lease_spool_slot()
            target = lease.address if lease else run.address
            assert target is not None
            with self._clock.span("device_to_host"):
                self._transfer.copy_out(gradient, target, (run.start - start) * size, run.n * size)
            if lease is not None:
                batch = self._store.batch()
                scratch.write(lease.address, run.n * size, run.start * size, batch)
                self._spooling.append((batch.submit(), lease))

    def begin_early_update(self, apply: Callable[[LoadedGroup], None]) -> None:
        self.finish_update()
        # On its thread it comes after the commit that is under way, whose places it may overwrite.
        self._early, self._updating = apply, self._update.start()

    def update_early(self, tensors: Collection[str]) -> None:
        if self._early is not None:
            for index in self._host.groups_of(tensors):
                self._update.add(index, self._early)

    def cancel_update(self) -> None:
        if self._early is not None:
            self._early = self._updating = None
            self._update.give_up()

    def drop_gradients(self) -> None:
        # The next step's are written to the same places.
        self._finish_spooling()

    def prepare_update(self) -> None:
        if self._early is None:
            # What the last committed generation does not use may only be overwritten once a newer one is committed.
            self.finish_commit()

    def begin_update(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        self.prepare_update()
        self._finish_spooling()
        if self._early is None:
            self._updating = self._update.start()
        self._early = None
        self._update.add_rest(skip_gradient, apply)
        self.version += 1

    def finish_update(self) -> None:
        with self._clock.span("optimizer"):
            self._update.finish()

    def write(self, tensor: str, start: int, values: NDArray[Any]) -> None:
        self.finish_commit()
        self._store.write_elements(tensor, start, values)

    def read(self, tensor: str, start: int, n_elements: int) -> NDArray[Any]:
        self.finish_update()
        return self._store.read_elements(tensor, start, n_elements)

    def visit_groups(self, visit: Visit) -> None:
        self.finish_commit()
        visit_stored(self._layout, self._store, self._pool, self._update_depth, visit)

    def fill_groups(self, fill: Fill) -> None:
        self.finish_commit()
        fill_stored(self._layout, self._store, self._pool, self._update_depth, fill)

    def begin_commit(self, run_state: bytes) -> None:
        if self._committing is not None and not self._committing.done():
            # Two commits without an update between them: the first one's update has no reader to wait for.
            self.finish_commit()
        committing, self._committing = self._committing, None
        if committing is not None:
            committing.result()
        # Behind the update on its thread, and beside the next step: the disk's flush takes long.
        self._committing = self._thread.submit(self._commit, self._updating, run_state)

    def _commit(self, updating: Future[None] | None, run_state: bytes) -> None:
        if updating is None or updating.exception() is None:
            with trace.span(trace.PHASE, "commit"):
                self._store.commit(run_state)

    def finish_commit(self) -> None:
        self.finish_update()
        committing, self._committing = self._committing, None
        if committing is not None:
            with self._clock.span("commit"):
                committing.result()

    def io_bytes(self) -> tuple[int, int]:
        counters = self._store.counters()
        return counters.read_bytes, counters.write_bytes

    def close(self) -> None:
        """Gives up what is not finished: an update that nobody waited for is not committed."""
        self._update.abandon()
        try:
            self._thread.shutdown()
        finally:
            while self._spooling:
                reap(self._spooling)
            self._host.close()

    def _finish_spooling(self) -> None:
        with self._clock.span("ssd_write_wait"):
            while self._spooling:
                reap(self._spooling)

    def _lease_spool_slot(self) -> Lease:
        while self._spooling and self._spooling[0][0].done():
            reap(self._spooling)
        if self._spooling and self._pool.free_count(SPOOL) == 0:
            reap(self._spooling)
        return self._pool.lease(SPOOL)


class SsdStage:
    """A stage being read into leased slots."""

    def __init__(self, owner: SsdPlacement, kind: str, parts: tuple[StagePart, ...]) -> None:
        self.version = owner.version
        self._owner = owner
        self._kind = kind
        self._parts = parts
        self._leases = [owner.lease(kind, part) for part in parts]
        self._ticket: Ticket | None
        self._ticket, self._receptions = owner.begin_read(parts, self._leases)
        self._arrays: dict[str, jax.Array] | None = None

    def arrays(self) -> dict[str, jax.Array]:
        self._wait()
        if self._receptions:
            with self._owner._clock.span("optimizer"):
                self._owner._update.wait(self._receptions)
            self._receptions = []
        if self._arrays is None:
            dtype = self._owner._layout.format.param_dtype
            with self._owner._clock.span("host_to_device"):
                self._arrays = {
                    part.local_name: self._owner._transfer.to_device(lease, dtype, part.memory_shape)
                    for part, lease in zip(self._parts, self._leases, strict=True)
                }
        return self._arrays

    def forget_arrays(self) -> None:
        self._arrays = None

    def refresh(self) -> None:
        self._owner._update.cancel(self._receptions)
        self._wait()
        self._arrays = None
        is_trained = self._owner._layout.is_trained
        changing = [number for number, part in enumerate(self._parts) if is_trained(part.tensor)]
        for number in changing:
            # Another slot than the one that a computation may still be reading.
            self._leases[number].release()
            self._leases[number] = self._owner.lease(self._kind, self._parts[number])
        self._ticket, self._receptions = self._owner.begin_read(
            [self._parts[number] for number in changing], [self._leases[number] for number in changing]
        )
        self.version = self._owner.version

    def release(self) -> None:
        # The kernel may still be writing into the slots of a stage that was dropped unused.
        self._owner._update.cancel(self._receptions)
        self._wait()
        self._arrays = None
        for lease in self._leases:
            lease.release()

    def _wait(self) -> None:
        if self._ticket is not None:
            with self._owner._clock.span("ssd_read_wait"):
                self._ticket.wait()
            self._ticket = None
