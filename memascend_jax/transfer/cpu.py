# SPDX-License-Identifier: Apache-2.0
"""Slots and arrays of the CPU backend: in by alias, out by one native copy.

In: XLA aliases our memory through our own DLPack producer and drops it on its own thread, which the slot's reader
count sees. numpy's way is closed: it aliases asynchronously even when told not to, and nobody counts.
Out: XLA's buffers are 64-byte aligned and direct I/O wants whole blocks, so one copy into a slot is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from memascend_jax._native import _core
from memascend_jax.errors import RunError
from memascend_jax.memory.lease import Lease
from memascend_jax.transfer.ranges import checked_nbytes


class CpuTransfer:
    """Transfers to and from one device of the CPU backend."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def to_device(self, lease: Lease, dtype: str, shape: Sequence[int], offset: int = 0) -> jax.Array:
        """Returns an array that aliases the slot's bytes from ``offset`` (a multiple of 64).

        Raises:
            RunError: jax made a copy: its memory would not be in the plan.
        """
        array: jax.Array = jax.dlpack.from_dlpack(lease.export(dtype, shape, offset))
        if array.size and array.unsafe_buffer_pointer() != lease.address + offset:
            raise RunError(
                f"jax copied '{lease.label}' instead of reading it in place ({dtype} {tuple(shape)} at offset "
                f"{offset:,}); enable jax_enable_x64 for 64-bit types, or use a smaller type"
            )
        return array

    def copy_out(
        self, array: jax.Array, address: int, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Waits for ``array``, then copies on the kernel threads without the GIL."""
        wanted = checked_nbytes(array.nbytes, offset_bytes, nbytes)
        array.block_until_ready()
        if wanted:
            _core.copy(address, array.unsafe_buffer_pointer() + offset_bytes, wanted)

    def close(self) -> None:
        """Nothing was set up: aliases end with their arrays."""
