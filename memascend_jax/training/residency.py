# SPDX-License-Identifier: Apache-2.0
"""Which update groups keep their state, or their gradients, in host memory: what a spare budget is spent on. Pure.

A group whose gradients stay saves writing and reading them; a group whose state stays saves reading it too. Its new
state is written in every step all the same, so that a commit is whole. The groups are spread evenly over the update,
so that the disk is as busy in one part of the forward as in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize
from memascend_jax.training.model_layout import ModelLayout, UpdateGroup, UpdatePiece
from memascend_jax.training.stage_schedule import LAYER, NORM
from memascend_jax.units import round_up

#: A piece by tensor and tile.
PieceKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Residency:
    """Indices into ``ModelLayout.update_groups``; no group is in both.

    Attributes:
        state: groups whose whole slot stays: parameters, gradients and state.
        gradients: groups whose gradients stay.
    """

    state: frozenset[int] = field(default=frozenset())
    gradients: frozenset[int] = field(default=frozenset())


def plan_residency(
    layout: ModelLayout, state_groups: int, gradient_groups: int, *, in_backward: bool = False
) -> Residency:
    """Returns which groups stay when there is room for so many of each; more than there are is all of them."""
    every = range(len(layout.update_groups))
    state = _spread(every, state_groups)
    spooled = [index for index in spooled_groups(layout, in_backward=in_backward) if index not in state]
    return Residency(state, _spread(spooled, gradient_groups))


def spooled_groups(layout: ModelLayout, *, in_backward: bool = False) -> list[int]:
    """Returns the groups that have gradients to put away until the update.

    Not an untied embedding's, which are rows and stay in memory anyway, nor those that are updated in the backward.
    Frozen tensors are in no group.
    """
    early = early_groups(layout) if in_backward else frozenset()
    return [
        index
        for index, group in enumerate(layout.update_groups)
        if index not in early and (layout.tied or group.pieces[0].tensor != EMBED_NAME)
    ]


def early_tensors(layout: ModelLayout) -> frozenset[str]:
    """Returns the tensors that may be updated in the backward: layers and final norm, whose gradients come whole."""
    keys = (key for key in layout.stage_parts if key.kind in (LAYER, NORM))
    return frozenset(part.tensor for key in keys for part in layout.trained_parts(key))


def early_groups(layout: ModelLayout) -> frozenset[int]:
    """Returns the groups of ``early_tensors``."""
    tensors = early_tensors(layout)
    return frozenset(
        index for index, group in enumerate(layout.update_groups) if group.pieces[0].tensor in tensors
    )


def most_early_groups(layout: ModelLayout) -> int:
    """Returns the groups of the layer that has most of them: their gradients are in memory together."""
    stages = {tensor.name: tensor.stage for tensor in layout.tensors}
    early = (layout.update_groups[index] for index in early_groups(layout))
    counts = Counter(stages[group.pieces[0].tensor] for group in early)
    return max(counts.values(), default=0)


def gradient_offsets(layout: ModelLayout, group: UpdateGroup) -> tuple[dict[PieceKey, int], int]:
    """Returns where each piece's gradients lie in a slot for gradients alone, in bytes, and the bytes of all."""
    offsets: dict[PieceKey, int] = {}
    used = 0
    for piece in group.pieces:
        offsets[piece_key(piece)] = used
        used += round_up(piece.n_elements * itemsize(layout.format.grad_dtype), BLOCK_BYTES)
    return offsets, used


def piece_key(piece: UpdatePiece) -> PieceKey:
    return piece.tensor, piece.tile


def _spread(candidates: Collection[int], wanted: int) -> frozenset[int]:
    """Returns ``wanted`` of ``candidates`` at even distances."""
    total = len(candidates)
    chosen = min(wanted, total)
    return frozenset(
        candidate
        for position, candidate in enumerate(candidates)
        if (position + 1) * chosen // total > position * chosen // total
    )
