# SPDX-License-Identifier: Apache-2.0
"""The inputs of the layers between forward and backward: kept as arrays, or written to SSD and read back in time.

They are all that grows with the model's depth; with many tokens they are the largest part of memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memascend_jax.dtypes import dtype_name
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.state_format import itemsize
from memascend_jax.storage.tensor_store import TensorStore, Ticket
from memascend_jax.training.slot_classes import INPUTS
from memascend_jax.training.update_stream import reap
from memascend_jax.transfer import Transfer

if TYPE_CHECKING:
    import jax


class StageInputs(Protocol):
    """Takes the inputs of each layer in order and gives them back in reverse, micro-batch by micro-batch."""

    def put(self, xs: Sequence[jax.Array]) -> None:
        """Takes the inputs ``[B, S, H]`` of the next layer, one per micro-batch, once its forward is dispatched."""

    def take(self) -> jax.Array:
        """Returns the next input of the backward: the layers in reverse, the micro-batches of each in order.

        Only the newest may be referenced when the next is asked for, or the slots run out. Python's ``zip`` and
        ``enumerate`` keep what they yielded for one and two rounds more.
        """


class KeptInputs:
    """Inputs that stay on the device."""

    def __init__(self) -> None:
        self._layers: list[deque[jax.Array]] = []

    def put(self, xs: Sequence[jax.Array]) -> None:
        self._layers.append(deque(xs))

    def take(self) -> jax.Array:
        layer = self._layers[-1]
        x = layer.popleft()
        if not layer:
            self._layers.pop()
        return x


class _Place(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: str


class SpilledInputs:
    """Inputs in a scratch extent of ``nbytes`` on SSD; they pass through the slots of the class ``INPUTS``."""

    def __init__(
        self, store: TensorStore, pool: SlotPool, transfer: Transfer, clock: StepClock, *, nbytes: int
    ) -> None:
        self._pool = pool
        self._transfer = transfer
        self._clock = clock
        self._scratch = store.scratch("stage inputs", nbytes)
        self._n_slots = pool.classes[INPUTS].count
        self._layers: list[list[_Place]] = []
        self._used = 0
        self._writing: deque[tuple[Ticket, Lease]] = deque()
        self._upcoming: deque[_Place] = deque()
        self._reading: deque[tuple[Ticket, Lease, _Place]] = deque()

    def put(self, xs: Sequence[jax.Array]) -> None:
        places = []
        for x in xs:
            with self._clock.span("ssd_write_wait"):
                if len(self._writing) == self._n_slots:
                    reap(self._writing)
                lease = self._pool.lease(INPUTS)
            with self._clock.span("device_to_host"):
                self._transfer.copy_out(x, lease.address)
            ticket = self._scratch.write(lease.address, x.nbytes, self._used)
            assert ticket is not None
            self._writing.append((ticket, lease))
            places.append(_Place(self._used, x.shape, dtype_name(x.dtype)))
            self._used += lease.nbytes
        self._layers.append(places)

    def take(self) -> jax.Array:
        if self._layers:
            self._begin_backward()
        # One slot is being computed on; the others read ahead.
        while self._upcoming and len(self._reading) < self._n_slots - 1:
            self._read(self._upcoming.popleft())
        ticket, lease, place = self._reading.popleft()
        with self._clock.span("ssd_read_wait"):
            ticket.wait()
        with self._clock.span("host_to_device"):
            x = self._transfer.to_device(lease, place.dtype, place.shape)
        # Whoever reads the array keeps the slot from being lent again.
        lease.release()
        return x

    def _begin_backward(self) -> None:
        """Everything is written, and is asked for in this order."""
        self._upcoming.extend(place for layer in reversed(self._layers) for place in layer)
        self._layers.clear()
        self._used = 0
        with self._clock.span("ssd_write_wait"):
            while self._writing:
                reap(self._writing)

    def _read(self, place: _Place) -> None:
        lease = self._pool.lease(INPUTS)
        nbytes = math.prod(place.shape) * itemsize(place.dtype)
        ticket = self._scratch.read(lease.address, nbytes, place.offset)
        assert ticket is not None
        self._reading.append((ticket, lease, place))


def make_inputs(
    spilled_bytes: int, store: TensorStore | None, pool: SlotPool, transfer: Transfer, clock: StepClock
) -> StageInputs:
    """Returns where the inputs of a step go: to SSD when the plan has ``spilled_bytes`` for them."""
    if spilled_bytes and store is not None:
        return SpilledInputs(store, pool, transfer, clock, nbytes=spilled_bytes)
    return KeptInputs()
