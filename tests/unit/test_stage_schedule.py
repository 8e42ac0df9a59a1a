# SPDX-License-Identifier: Apache-2.0
"""What is read when: every use is resident in time, capacities hold, and slots save reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend_jax.training.stage_schedule import (
    HEAD,
    LAYER,
    NORM,
    StageKey,
    count_loads,
    forward_sequence,
    plan_actions,
    training_sequence,
)


def replay(sequence, actions, capacity):
    """Carries out ``actions`` and checks what the prefetcher relies on."""
    resident: set[StageKey] = set()
    for key, action in zip(sequence, actions, strict=True):
        for dropped in action.drops:
            resident.remove(dropped)
        for loaded in action.loads:
            assert loaded not in resident
            resident.add(loaded)
        assert key in resident
        for kind, most in capacity.items():
            assert sum(known.kind == kind for known in resident) <= most


@given(
    layers=st.integers(1, 12),
    tiles=st.integers(1, 6),
    layer_slots=st.integers(1, 14),
    head_slots=st.integers(1, 7),
    depth=st.integers(0, 5),
)
def test_every_use_is_resident_and_capacities_hold(layers, tiles, layer_slots, head_slots, depth):
    capacity = {LAYER: layer_slots, HEAD: head_slots, NORM: 1}
    for sequence in (training_sequence(layers, tiles), forward_sequence(layers, tiles)):
        replay(sequence, plan_actions(sequence, capacity, depth), capacity)


def test_the_top_turn_serves_the_backward_from_the_last_layers():
    sequence = training_sequence(6, 1)
    loads = count_loads(plan_actions(sequence, {LAYER: 3, HEAD: 1, NORM: 1}, 1))
    assert [loads[StageKey(LAYER, index)] for index in range(6)] == [2, 2, 2, 1, 1, 1]
    assert loads[StageKey(HEAD, 0)] == 1


@pytest.mark.parametrize("slots", range(2, 9))
def test_one_more_slot_saves_one_more_read(slots):
    def reads(count):
        sequence = training_sequence(8, 2)
        return sum(count_loads(plan_actions(sequence, {LAYER: count, HEAD: 2, NORM: 1}, 1)).values())

    assert reads(slots) == reads(slots - 1) - 1


def test_reads_run_ahead_of_the_use_by_the_depth():
    sequence = forward_sequence(8, 1)
    actions = plan_actions(sequence, {LAYER: 8, HEAD: 1, NORM: 1}, 3)
    assert [key.index for key in actions[0].loads] == [0, 1, 2, 3]
    assert [key.index for key in actions[1].loads] == [4]


def test_of_layers_that_are_done_the_slot_of_the_one_still_computing_is_taken_last():
    sequence = training_sequence(9, 1)
    actions = plan_actions(sequence, {LAYER: 4, HEAD: 1, NORM: 1}, 2)
    for position in range(1, len(sequence)):
        assert sequence[position - 1] not in actions[position].drops, (
            f"{sequence[position]} waits for the one before"
        )


def test_keys_that_stay_are_read_once_for_all_passes_and_never_dropped() -> None:
    sequence = training_sequence(6, 3, lowest=3)
    assert sequence.count(StageKey(LAYER, 2)) == 1 and sequence.count(StageKey(LAYER, 3)) == 2
    capacity, staying = {LAYER: 4, HEAD: 3, NORM: 1}, {StageKey(LAYER, 0), StageKey(HEAD, 1)}
    first = plan_actions(sequence, capacity, 1, staying=staying)
    later = plan_actions(sequence, capacity, 1, staying=staying, are_there=True)
    assert all(count_loads(first)[key] == 1 for key in staying)
    assert not staying & count_loads(later).keys()
    for actions in (first, later):
        assert not any(staying & set(action.drops) for action in actions)
        # The others make do with what is left.
        resident: set[StageKey] = set()
        for action in actions:
            resident = (resident - set(action.drops)) | (set(action.loads) - staying)
            assert sum(key.kind == LAYER for key in resident) <= 3
            assert sum(key.kind == HEAD for key in resident) <= 2
    assert {k: n for k, n in count_loads(first).items() if k not in staying} == count_loads(later)
