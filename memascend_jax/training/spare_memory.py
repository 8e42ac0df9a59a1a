# SPDX-License-Identifier: Apache-2.0
"""What a budget larger than a run needs is spent on: gradients, layers and state that stay in memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from memascend_jax.training.depths import Depths
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.residency import gradient_offsets, spooled_groups
from memascend_jax.training.ssd_classes import stage_bytes
from memascend_jax.training.stage_schedule import HEAD, LAYER
from memascend_jax.units import round_up


def spend_memory(layout: ModelLayout, depths: Depths, spare_bytes: int, page_bytes: int) -> Depths:
    """Returns ``depths`` with as much kept in memory as ``spare_bytes`` hold."""
    gradients = round_up(
        max(gradient_offsets(layout, group)[1] for group in layout.update_groups), page_bytes
    )
    state = round_up(max(group.nbytes for group in layout.update_groups), page_bytes)
    n_groups = len(layout.update_groups)
    n_spooled = len(spooled_groups(layout, in_backward=depths.early_update))

    def afford(cost: int, most: int) -> int:
        nonlocal spare_bytes
        count = min(max(spare_bytes, 0) // cost, most)
        spare_bytes -= count * cost
        return count

    # A byte of gradients saves writing and reading it; a byte of parameters or of state only reading it.
    gradient_groups = afford(gradients, n_spooled)
    more_layers = afford(stage_bytes(layout, LAYER, page_bytes), max(layout.n_layers - depths.layer_slots, 0))
    more_tiles = afford(
        stage_bytes(layout, HEAD, page_bytes), max(layout.n_head_tiles - depths.head_slots, 0)
    )
    state_groups = 0
    if gradient_groups == n_spooled:
        # A group's whole slot has room for its gradients: where it had some, the slot for them alone is free again.
        # One slot is kept back, as the groups are spread evenly up to one.
        spare_bytes -= gradients
        state_groups = (
            afford(state - gradients * n_spooled // n_groups, n_groups) if spare_bytes >= state else 0
        )
        gradient_groups = min(gradient_groups, n_groups - state_groups)
    return replace(
        depths,
        layer_slots=depths.layer_slots + more_layers,
        head_slots=depths.head_slots + more_tiles,
        gradient_groups=gradient_groups,
        state_groups=state_groups,
    )
