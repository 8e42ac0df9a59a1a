# SPDX-License-Identifier: Apache-2.0
"""The choices that trade memory for speed: how deep, how many slots, how large a tile. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memascend_jax.units import MIB

#: Blocks from this size on are given back to the kernel when they are freed.
TIGHT_HEAP_BYTES = 1 * MIB
#: Tiles that a model is cut into at most, about; a larger one gets larger tiles, whose slots it does not notice.
MOST_TILES = 1 << 18


@dataclass(frozen=True, slots=True)
class Depths:
    """The choices that trade memory for speed, ordered fast to small in ``CHOICES``.

    ``gradient_groups`` and ``state_groups`` of the update stay in host memory: what a spare budget is spent on.
    ``heap_bytes``: freed blocks of up to this stay with the C library: 14 % less processor time in a step.
    ``early_update``: layers are updated in the backward, and their gradients never leave memory.
    ``spill_inputs``: the layers' inputs wait for the backward on SSD; tried where the same without it does not fit.
    """

    prefetch_depth: int
    layer_slots: int
    head_slots: int
    update_depth: int
    tile_elements: int
    head_tile_bytes: int
    gradient_groups: int = 0
    state_groups: int = 0
    heap_bytes: int = TIGHT_HEAP_BYTES
    spill_inputs: bool = False
    early_update: bool = False


CHOICES = (
    Depths(2, 4, 3, 6, 1 << 20, 8 * MIB, heap_bytes=16 * MIB),
    Depths(2, 4, 3, 6, 1 << 20, 8 * MIB),
    Depths(2, 4, 2, 4, 1 << 19, 8 * MIB),
    Depths(1, 3, 2, 3, 1 << 18, 4 * MIB),
    Depths(1, 2, 2, 2, 1 << 17, 2 * MIB),
)


def with_spill(choices: Sequence[Depths]) -> Iterator[Depths]:
    """Yields each choice, and the same with the layers' inputs on SSD: they are read long after they are written."""
    for depths in choices:
        yield depths
        yield replace(depths, spill_inputs=True)


def least_tile_elements(n_parameters: int) -> int:
    """Returns the smallest tile that a model is cut into: of a huge one, few enough to plan and keep in tables."""
    return 1 << (max(n_parameters // MOST_TILES, 1) - 1).bit_length()
