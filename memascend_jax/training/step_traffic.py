# SPDX-License-Identifier: Apache-2.0
"""The SSD bytes that a step moves, phase by phase, whole blocks counted. Pure.

The update of the step before runs beside the forward, which receives each stage's parameters from memory: the first
use of a stage reads nothing but what is frozen. The first step of a run has no update, and what follows the last one
has nothing else.

The run's counters are held to the sum; ``training.step_time`` makes seconds of the phases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.optim.state_format import BLOCK_BYTES, Leaf, itemsize
from memascend_jax.training.backward_reach import backward_reach, staying_stages
from memascend_jax.training.model_layout import PARAMETER, ModelLayout
from memascend_jax.training.residency import Residency, spooled_groups
from memascend_jax.training.stage_schedule import (
    Action,
    StageKey,
    count_loads,
    plan_actions,
    training_sequence,
)
from memascend_jax.units import round_up

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class PhaseTraffic:
    """What one phase of a step reads from and writes to SSD."""

    phase: str
    read_bytes: int
    write_bytes: int


def step_traffic(
    layout: ModelLayout,
    capacity: Mapping[str, int],
    residency: Residency,
    early: frozenset[int],
    prefetch_depth: int,
    step_tokens: int,
    spilled_bytes: int = 0,
) -> tuple[PhaseTraffic, ...]:
    """Returns the traffic of the forward, with the update of the step before, and of the backward.

    Args:
        capacity: resident keys of each stage kind, as for ``plan_actions``.
        residency: update groups that keep their state or gradients in memory.
        early: update groups that are updated in the backward: the forward reads their parameters.
        prefetch_depth: uses ahead that a stage is read.
        step_tokens: tokens of all micro-batches: the embedding is read by their rows.
        spilled_bytes: inputs of the layers that wait for the backward on SSD.
    """
    sequence = training_sequence(layout.n_layers, layout.n_head_tiles, backward_reach(layout).lowest)
    staying = staying_stages(layout, capacity, prefetch_depth)
    actions = plan_actions(sequence, capacity, prefetch_depth, staying=staying, are_there=True)
    rest = frozenset(range(len(layout.update_groups))) - early
    early_read, early_write = _update_bytes(layout, residency, early)
    update_read, update_write = _update_bytes(layout, residency, rest)
    gradients = _gradient_bytes(layout, residency, early)
    parameters = sum(
        _blocks(piece.n_elements, layout.format.param_dtype)
        for index in early
        for piece in layout.update_groups[index].pieces
    )
    return (
        PhaseTraffic(
            FORWARD,
            _row_bytes(layout, step_tokens)
            + gradients
            + update_read
            + parameters
            + _frozen_bytes(layout, staying),
            update_write + spilled_bytes,
        ),
        PhaseTraffic(
            BACKWARD,
            _reload_bytes(layout, actions) + spilled_bytes + early_read,
            gradients + early_write,
        ),
    )


def _reload_bytes(layout: ModelLayout, actions: Sequence[Action]) -> int:
    """Bytes of the stages that are read again after they were dropped."""
    dtype = layout.format.param_dtype
    return sum(
        (count - 1) * sum(_blocks(part.n_elements, dtype) for part in layout.stage_parts[key])
        for key, count in count_loads(actions).items()
    )


def _frozen_bytes(layout: ModelLayout, staying: Collection[StageKey]) -> int:
    """Bytes of what no update hands over: frozen parts of stages, each read once in the forward unless it stays."""
    return sum(
        _blocks(part.n_elements, layout.format.param_dtype)
        for key, parts in layout.stage_parts.items()
        if key not in staying
        for part in parts
        if not layout.is_trained(part.tensor)
    )


def _row_bytes(layout: ModelLayout, step_tokens: int) -> int:
    """Bytes of the embedding rows that a step uses, all different ones.

    They are updated first, from their state; those of a frozen embedding are only read.
    """
    fmt = layout.format
    total = 0
    leaves = layout.leaves_of(EMBED_NAME)
    parameter = [] if leaves and fmt.has_master else [Leaf(PARAMETER, fmt.param_dtype)]
    for leaf in (*leaves, *parameter):
        row = leaf.values(layout.config.hidden_size) * itemsize(leaf.dtype)
        # Rows of one block are read once: never more than the table.
        table = round_up(layout.config.vocab_size * row, BLOCK_BYTES)
        total += min(step_tokens * _row_span(row), table)
    return total


def _row_span(row_bytes: int) -> int:
    """Bytes of the blocks that one row touches, on average over row positions."""
    apart = math.gcd(row_bytes, BLOCK_BYTES)
    positions = range(0, BLOCK_BYTES, apart)
    spans = [round_up(offset + row_bytes, BLOCK_BYTES) for offset in positions]
    return -(-sum(spans) // len(spans))


def _gradient_bytes(layout: ModelLayout, residency: Residency, early: frozenset[int]) -> int:
    """Bytes of the gradients that go to SSD and come back."""
    in_memory = residency.state | residency.gradients | early
    return sum(
        _blocks(piece.n_elements, layout.format.grad_dtype)
        for index in spooled_groups(layout)
        if index not in in_memory
        for piece in layout.update_groups[index].pieces
    )


def _update_bytes(layout: ModelLayout, residency: Residency, groups: frozenset[int]) -> tuple[int, int]:
    """Bytes of parameters and state that the update of ``groups`` reads and writes."""
    fmt = layout.format
    read = write = 0
    for index in groups:
        for piece in layout.update_groups[index].pieces:
            leaves = sum(_blocks(leaf.values(piece.n_elements), leaf.dtype) for leaf in fmt.leaves)
            parameter = _blocks(piece.n_elements, fmt.param_dtype)
            if index not in residency.state:
                read += leaves if fmt.has_master else leaves + parameter
            write += leaves + parameter
    return read, write


def _blocks(elements: int, dtype: str) -> int:
    return round_up(elements * itemsize(dtype), BLOCK_BYTES)
