# SPDX-License-Identifier: Apache-2.0
"""The size classes of slots that streaming from SSD needs, for given depths, and what they follow from. Pure."""

from __future__ import annotations

import math

from memascend_jax.memory.pool import SizeClass
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize
from memascend_jax.training.backward_reach import backward_reach
from memascend_jax.training.depths import Depths
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.residency import (
    Residency,
    early_groups,
    gradient_offsets,
    most_early_groups,
    plan_residency,
)
from memascend_jax.training.slot_classes import GRADIENTS, INPUTS, SPOOL, UPDATE, part_class
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey
from memascend_jax.training.workload import Workload
from memascend_jax.units import round_up

SPOOL_SLOTS = 8
INPUT_SLOTS = 3


def ssd_classes(layout: ModelLayout, depths: Depths, workload: Workload) -> dict[str, SizeClass]:
    """Returns the pool's size classes for streaming: exact sizes of stage parts, update slots, spool slots."""
    counts: dict[str, SizeClass] = {}
    capacity = stage_capacity(layout, depths)
    for key in (StageKey(LAYER, 0), StageKey(NORM, 0), StageKey(HEAD, 0)):
        for part in layout.stage_parts[key]:
            nbytes = part_bytes(layout, math.prod(part.memory_shape))
            name = part_class(key.kind, nbytes)
            known = counts.get(name, SizeClass(nbytes, 0))
            counts[name] = SizeClass(nbytes, known.count + capacity[key.kind])
    residency = residency_of(layout, depths)
    counts[UPDATE] = SizeClass(
        max(group.nbytes for group in layout.update_groups), depths.update_depth + len(residency.state)
    )
    early = early_groups(layout) if depths.early_update else frozenset()
    if residency.gradients or early:
        largest = max(
            gradient_offsets(layout, layout.update_groups[index])[1] for index in residency.gradients | early
        )
        # Two layers' gradients: one is updated while the next arrives.
        moving = 2 * most_early_groups(layout) if early else 0
        counts[GRADIENTS] = SizeClass(largest, len(residency.gradients) + moving)
    counts[SPOOL] = SizeClass(spool_slot_bytes(layout, depths), SPOOL_SLOTS)
    if depths.spill_inputs:
        counts[INPUTS] = SizeClass(input_bytes(layout, workload), INPUT_SLOTS)
    return counts


def spool_slot_bytes(layout: ModelLayout, depths: Depths) -> int:
    """Returns the bytes of a slot that carries gradients to the spool."""
    largest = max(tensor.elements for tensor in layout.trained)
    return round_up(min(largest, depths.tile_elements) * itemsize(layout.format.grad_dtype), BLOCK_BYTES)


def input_bytes(layout: ModelLayout, workload: Workload) -> int:
    """Bytes of one layer's input of one micro-batch, whole blocks."""
    values = workload.micro_batch_tokens * layout.config.hidden_size
    return round_up(values * itemsize(layout.format.param_dtype), BLOCK_BYTES)


def spilled_bytes(layout: ModelLayout, depths: Depths, workload: Workload) -> int:
    layers = backward_reach(layout).layers
    inputs = layers * workload.gradient_accumulation_steps * input_bytes(layout, workload)
    return inputs if depths.spill_inputs else 0


def stage_capacity(layout: ModelLayout, depths: Depths) -> dict[str, int]:
    return {
        LAYER: min(depths.layer_slots, layout.n_layers),
        HEAD: min(depths.head_slots, layout.n_head_tiles),
        NORM: 1,
    }


def residency_of(layout: ModelLayout, depths: Depths) -> Residency:
    return plan_residency(
        layout, depths.state_groups, depths.gradient_groups, in_backward=depths.early_update
    )


def stage_bytes(layout: ModelLayout, kind: str, page_bytes: int = BLOCK_BYTES) -> int:
    """Bytes of the slots of one stage."""
    return sum(
        round_up(part_bytes(layout, math.prod(part.memory_shape)), page_bytes)
        for part in layout.stage_parts[StageKey(kind, 0)]
    )


def part_bytes(layout: ModelLayout, elements: int) -> int:
    return round_up(elements * itemsize(layout.format.param_dtype), BLOCK_BYTES)
