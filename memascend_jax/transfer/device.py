# SPDX-License-Identifier: Apache-2.0
"""Slots and arrays of a device with memory of its own: a copy each way.

Registered memory is copied by DMA (``transfer.straight``). All else goes through the runtime's staging: in through its
own pinned memory, out through a host array as large as the array. So does a slot that lies across two regions of the
arena, at most one in each GiB.

Known shortcoming: XLA stages nothing of 1 GiB and more, so a tensor that large is copied from where it lies, across
regions, which CUDA may refuse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from memascend_jax._native import _core
from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.lease import Lease
from memascend_jax.observe import trace
from memascend_jax.transfer.ranges import checked_nbytes
from memascend_jax.transfer.straight import StraightCopies, working_ways


class DeviceTransfer:
    """Transfers to and from one accelerator.

    Args:
        arena: registered with the device until ``close``, as far as the machine allows; None: copies are staged.

    Attributes:
        straight_in, straight_out: whether registered slots are copied by DMA to and from the device.
    """

    def __init__(self, device: jax.Device, arena: PinnedArena | None = None) -> None:
        self._device = device
        self._straight = StraightCopies(device, arena) if arena is not None else None
        registered = self._straight is not None and self._straight.registration.holds_any
        self.straight_in, self.straight_out = working_ways(device) if registered else (False, False)

    def to_device(self, lease: Lease, dtype: str, shape: Sequence[int], offset: int = 0) -> jax.Array:
        """Starts a copy and returns its array; the slot is not lent again before the copy has ended."""
        began = time.perf_counter_ns()
        straight = self._straight_for(lease.address + offset, math.prod(shape) * to_dtype(dtype).itemsize)
        if straight is not None and self.straight_in:
            array = straight.put(lease, dtype, shape, offset)
        else:
            array = jax.device_put(lease.view(to_dtype(dtype), shape, offset), self._device)
        lease.defer(_Arrival(array))
        if trace.current is not None:
            trace.current.copied(lease.label, began, array)
        return array

    def copy_out(
        self, array: jax.Array, address: int, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Waits for ``array`` and copies it into registered memory by DMA, else by way of a host array.

        jax keeps a host array until ``array`` goes.
        """
        wanted = checked_nbytes(array.nbytes, offset_bytes, nbytes)
        straight = self._straight_for(address, wanted)
        if straight is not None and self.straight_out:
            straight.copy_out(array, address, offset_bytes, wanted)
        elif wanted:
            host = np.ascontiguousarray(np.asarray(array))
            _core.copy(address, host.ctypes.data + offset_bytes, wanted)

    def close(self) -> None:
        """Ends the registration of the arena, when nothing is being copied any more; copies are staged from then on."""
        self.straight_in = self.straight_out = False
        if self._straight is not None:
            self._straight.close()

    def _straight_for(self, address: int, nbytes: int) -> StraightCopies | None:
        if self._straight is not None and self._straight.registration.holds(address, nbytes):
            return self._straight
        return None


class _Arrival:
    """A copy to the device that still reads the slot. A deleted array has been used, so it had arrived."""

    def __init__(self, array: jax.Array) -> None:
        self._array: jax.Array | None = array

    def done(self) -> bool:
        array = self._array
        if array is None or array.is_deleted() or array.is_ready():  # type: ignore[attr-defined]
            self._array = None
            return True
        return False

    def wait(self) -> None:
        array, self._array = self._array, None
        if array is not None and not array.is_deleted():
            array.block_until_ready()
