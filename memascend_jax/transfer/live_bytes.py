# SPDX-License-Identifier: Apache-2.0
"""How much memory the arrays on a device take at the moment."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def live_bytes(device: jax.Device, regions: Sequence[tuple[int, int]]) -> int:
    """Returns the bytes in use on ``device``; on CPU those of jax's arrays, without what aliases the arena.

    Args:
        regions: (address, nbytes) of the arena.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_in_use" in statistics:
        return int(statistics["bytes_in_use"])
    arrays: list[jax.Array] = jax.live_arrays()  # type: ignore[no-untyped-call]
    return sum(_own_bytes(array, regions) for array in arrays)


def _own_bytes(array: jax.Array, regions: Sequence[tuple[int, int]]) -> int:
    try:
        # What is not ready is being computed, so its memory is jax's own.
        if array.is_ready():  # type: ignore[attr-defined]
            address = array.unsafe_buffer_pointer()
            if any(begin <= address < begin + nbytes for begin, nbytes in regions):
                return 0
        return int(array.nbytes)
    except RuntimeError:
        return 0  # deleted in the meantime, on another thread
