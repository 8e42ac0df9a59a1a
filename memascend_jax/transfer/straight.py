# SPDX-License-Identifier: Apache-2.0
"""Copies between registered slots and a CUDA device that go by DMA, past the runtime's staging memory.

In: the slot is imported as an array in pinned host memory, and the runtime copies from there. Out: the CUDA driver
copies into the slot, on a stream of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from memascend_jax._native import _core
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.lease import Lease
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.transfer.registration import Registration

_log = logging.getLogger(__name__)


class StraightCopies:
    """Copies between one arena, registered until ``close``, and one device."""

    def __init__(self, device: jax.Device, arena: PinnedArena) -> None:
        self._device = device
        self.registration = Registration(arena, device)

    def put(self, lease: Lease, dtype: str, shape: Sequence[int], offset: int) -> jax.Array:
        """Starts a copy of bytes that lie in one registered region; they count as being read until it has ended."""
        export = lease.export(dtype, shape, offset, cuda_ordinal=self._device.local_hardware_id)
        pinned = jax.dlpack.from_dlpack(export)
        # The memory is named: the device alone may stand for the memory that the array is in.
        array: jax.Array = jax.device_put(pinned, SingleDeviceSharding(self._device, memory_kind="device"))
        return array

    def copy_out(self, array: jax.Array, address: int, offset_bytes: int, nbytes: int) -> None:
        """Waits for ``array`` and copies its bytes from ``offset_bytes`` into one registered region, without the GIL.

        Raises:
            RuntimeError: there is no CUDA driver, or it fails; its error by name.
        """
        driver = self.registration.driver
        if driver is None:
            raise RuntimeError("there is no CUDA driver")
        array.block_until_ready()
        driver.copy_to_host(address, array.unsafe_buffer_pointer() + offset_bytes, nbytes)

    def close(self) -> None:
        """Ends the registration; nothing may be under way."""
        self.registration.close()


def working_ways(device: jax.Device) -> tuple[bool, bool]:
    """Returns whether straight copies (in, out) work with this runtime and driver: each is tried on a page.

    What a runtime cannot do shows in many ways, so any failure counts, and is logged with its reason.
    """
    page = _core.page_bytes()
    arena = PinnedArena(2 * page, pin="none")
    copies = StraightCopies(device, arena)
    pool = SlotPool(arena, {"probe": SizeClass(page, 2)})
    numbers = np.arange(page // 4, dtype=np.float32)
    ways = (
        _works("to", device, lambda: _way_in(copies, pool, numbers)),
        _works("from", device, lambda: _way_out(copies, pool, numbers, device)),
    )
    pool.close()
    copies.close()
    arena.close()
    return ways


def _works(direction: str, device: jax.Device, attempt: Callable[[], bool]) -> bool:
    try:
        if attempt():
            return True
        reason = "other bytes arrived"
    except Exception as error:
        reason = str(error)
    _log.warning("copies %s %s go through the runtime's own memory: %s", direction, device, reason)
    return False


def _way_in(copies: StraightCopies, pool: SlotPool, numbers: np.ndarray) -> bool:
    with pool.lease("probe") as lease:
        if not copies.registration.holds(lease.address, numbers.nbytes):
            raise RuntimeError("memory cannot be registered")
        lease.view(np.float32, numbers.shape)[:] = numbers
        array = copies.put(lease, "float32", numbers.shape, 0)
        return array.sharding.memory_kind == "device" and bool((np.asarray(array) == numbers).all())


def _way_out(copies: StraightCopies, pool: SlotPool, numbers: np.ndarray, device: jax.Device) -> bool:
    with pool.lease("probe") as lease:
        view = lease.view(np.float32, numbers.shape)
        view[:] = -1
        copies.copy_out(jax.device_put(numbers, device), lease.address, 0, numbers.nbytes)
        return bool((view == numbers).all())
