# SPDX-License-Identifier: Apache-2.0
"""Slots and arrays of a device with memory of its own: a copy each way, through the runtime's staging.

Known shortcoming: the arena is not registered with the device yet, so the runtime stages every copy through memory
of its own, and the way out goes through a host array that is as large as what is copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from memascend_jax._native import _core
from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.lease import Lease
from memascend_jax.observe import trace
from memascend_jax.transfer.ranges import checked_nbytes


class DeviceTransfer:
    """Transfers to and from one accelerator."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def to_device(self, lease: Lease, dtype: str, shape: Sequence[int], offset: int = 0) -> jax.Array:
        """Starts a copy and returns its array; the slot is not lent again before the copy has ended."""
        began = time.perf_counter_ns()
        array: jax.Array = jax.device_put(lease.view(to_dtype(dtype), shape, offset), self._device)
        lease.defer(_Arrival(array))
        if trace.current is not None:
            trace.current.copied(lease.label, began, array)
        return array

    def copy_out(
        self, array: jax.Array, address: int, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Waits for ``array`` and copies it by way of a host array, which jax keeps until ``array`` goes."""
        wanted = checked_nbytes(array.nbytes, offset_bytes, nbytes)
        host = np.ascontiguousarray(np.asarray(array))
        if wanted:
            _core.copy(address, host.ctypes.data + offset_bytes, wanted)


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
