# SPDX-License-Identifier: Apache-2.0
"""The only place where slots of the arena and jax arrays meet: one module per kind of platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from memascend_jax.memory.lease import Lease

if TYPE_CHECKING:
    import jax

    from memascend_jax.memory.arena import PinnedArena

__all__ = ["Transfer", "make_transfer"]


class Transfer(Protocol):
    """Moves tensors between leased slots and one device."""

    def to_device(self, lease: Lease, dtype: str, shape: Sequence[int], offset: int = 0) -> jax.Array:
        """Returns the slot's bytes from ``offset`` as an array on the device.

        The slot must not be written until the lease is released and lent again: the array may alias it, or the copy
        still be under way. Releasing the lease at once is fine: the slot is not lent again before.
        """
        ...

    def copy_out(
        self, array: jax.Array, address: int, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Waits for ``array`` and copies ``nbytes`` of it (default: to its end) from ``offset_bytes`` to ``address``.

        Offsets are in the array's bytes in C order. The memory at ``address`` belongs to the caller.
        """
        ...

    def close(self) -> None:
        """Lets go of what was set up with the device, when nothing is being moved; before the arena is closed."""
        ...


def make_transfer(device: jax.Device, arena: PinnedArena | None = None) -> Transfer:
    """Returns the transfer for the device's platform: aliases on CPU, copies elsewhere.

    Args:
        arena: registered with a device that has memory of its own, so that its slots are copied by DMA.
    """
    if device.platform == "cpu":
        from memascend_jax.transfer.cpu import CpuTransfer

        return CpuTransfer(device)
    from memascend_jax.transfer.device import DeviceTransfer

    return DeviceTransfer(device, arena)
