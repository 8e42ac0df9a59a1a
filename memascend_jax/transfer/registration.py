# SPDX-License-Identifier: Apache-2.0
"""The arena made known to an accelerator, so that copies go straight between slots and the device, by DMA.

Two ways, region by region: the runtime's own (PJRT ``dma_map``), and the CUDA driver's. What both refuse stays as it
was: copies of it go through memory of the runtime.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memascend_jax._native import _core
from memascend_jax.memory.arena import PinnedArena

if TYPE_CHECKING:
    import jax

BY_RUNTIME = "PJRT dma_map"


class Registration:
    """The regions of ``arena`` that ``device`` reads and writes by DMA, until ``close``.

    Never raises for a refusal: the arena's statistics have its reason.

    Attributes:
        driver: the CUDA driver's context of the device; None where there is none.

    Lifetime: holds the arena. ``close`` it before the arena, when nothing is being copied any more; a registration that
    is dropped is closed. The CUDA driver's part ends with the memory itself.
    """

    def __init__(self, arena: PinnedArena, device: jax.Device) -> None:
        mapped = _map_regions(arena, device.client)
        self._finalizer = weakref.finalize(self, _unmap, arena, device.client, mapped)
        # At exit copies may be under way, and the process's memory goes as a whole.
        self._finalizer.atexit = False
        self.driver = _register_rest(arena, device.local_hardware_id)
        self._ranges = [
            (region["address"], region["address"] + region["nbytes"])
            for region in arena.pinned_regions()
            if region["rung"] == "device"
        ]

    @property
    def holds_any(self) -> bool:
        return bool(self._ranges)

    def holds(self, address: int, nbytes: int) -> bool:
        """Returns whether the bytes lie in one registered region: a copy across two of them is none of DMA's."""
        return nbytes > 0 and any(begin <= address and address + nbytes <= end for begin, end in self._ranges)

    def close(self) -> None:
        """Undoes what the runtime has mapped; twice is harmless."""
        self._ranges = []
        self._finalizer()


def _map_regions(arena: PinnedArena, client: Any) -> Sequence[tuple[int, int]]:
    """Maps what the runtime takes and returns (index, address) of it."""
    mapped: list[tuple[int, int]] = []
    if not hasattr(client, "dma_map"):
        return mapped
    for index, (address, nbytes) in enumerate(arena.regions()):
        try:
            client.dma_map(address, nbytes)
        except RuntimeError as error:
            arena.note_refused(index, f"the runtime maps no memory for DMA: {error}")
            continue
        arena.note_registered(index, BY_RUNTIME)
        mapped.append((index, address))
    return mapped


def _unmap(arena: PinnedArena, client: Any, mapped: Sequence[tuple[int, int]]) -> None:
    for index, address in mapped:
        client.dma_unmap(address)
        arena.note_unregistered(index)


def _register_rest(arena: PinnedArena, ordinal: int) -> _core.CudaDriver | None:
    """Registers with the CUDA driver what is not yet; returns the driver, which also copies."""
    try:
        driver = _core.CudaDriver(ordinal)
    except RuntimeError as error:
        for index, region in enumerate(arena.pinned_regions()):
            if region["rung"] != "device":
                arena.note_refused(index, str(error))
        return None
    arena.register_with(driver)
    return driver
