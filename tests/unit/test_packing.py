# SPDX-License-Identifier: Apache-2.0
"""Packing and order: every pair once, nothing across examples, and a resume that needs only the step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend_jax.data.batches import BatchOrder, steps_of_epochs
from memascend_jax.data.examples import Encoded, ExampleBuilder, Examples
from memascend_jax.data.packing import pack

SEQ_LEN = 16


def examples_of(lengths: list[int]) -> Examples:
    """Examples whose tokens are all different, so that each can be found again; every second one is trained."""
    builder, first = ExampleBuilder(), 1
    for length in lengths:
        tokens = np.arange(first, first + length, dtype=np.int32)
        builder.add(Encoded(tokens, tokens % 2 == 0))
        first += length
    return builder.finish()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, SEQ_LEN + 1), min_size=1, max_size=60), st.integers(0, 2**32 - 1))
def test_every_pair_is_placed_once_and_in_order(lengths: list[int], seed: int) -> None:
    examples = examples_of(lengths)
    packed = pack(examples, range(len(lengths)), SEQ_LEN, pad_id=0, seed=seed)
    batch = packed.batch(range(len(packed)))
    used = batch.segments > 0
    pairs = sorted(zip(batch.tokens[used].tolist(), batch.labels[used].tolist(), strict=True))
    expected = [
        pair
        for number in range(len(lengths))
        for pair in zip(
            examples[number].tokens[:-1].tolist(), examples[number].tokens[1:].tolist(), strict=True
        )
    ]
    assert pairs == sorted(expected)
    assert (batch.weights[used] == (batch.labels[used] % 2 == 0)).all()
    assert not batch.weights[~used].any()
    assert packed.trained_tokens() == batch.trained_tokens
    assert packed.places_used() == int(used.sum())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, SEQ_LEN + 1), min_size=1, max_size=60))
def test_segments_and_positions_count_within_an_example(lengths: list[int]) -> None:
    packed = pack(examples_of(lengths), range(len(lengths)), SEQ_LEN, pad_id=0, seed=1)
    batch = packed.batch(range(len(packed)))
    for row in range(len(packed)):
        tokens, segments = batch.tokens[row], batch.segments[row]
        padding = np.flatnonzero(segments == 0)
        assert padding.size == 0 or padding[0] + padding.size == SEQ_LEN, "padding stands at the end"
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            assert (np.diff(places) == 1).all()
            assert batch.positions[row, places].tolist() == list(range(len(places)))
            assert (np.diff(tokens[places]) == 1).all(), "tokens of one example only"


def test_example_one_longer_than_the_sequence_still_fits_for_its_last_token_is_a_label() -> None:
    packed = pack(examples_of([SEQ_LEN + 1]), [0], SEQ_LEN, pad_id=0, seed=0)
    batch = packed.batch([0])
    assert (batch.segments == 1).all()
    assert batch.labels[0, -1] == SEQ_LEN + 1


def test_short_examples_fill_most_places() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(20, 90, 500)]
    packed = pack(examples_of(lengths), range(500), 256, pad_id=0, seed=0)
    assert packed.places_used() / (len(packed) * 256) > 0.9


def test_seed_decides_the_packing() -> None:
    examples = examples_of([5] * 40)
    one, again, other = (pack(examples, range(40), SEQ_LEN, pad_id=0, seed=seed) for seed in (3, 3, 4))
    assert one.numbers.tolist() == again.numbers.tolist() != other.numbers.tolist()


def test_batches_are_new_memory() -> None:
    packed = pack(examples_of([5, 6]), [0, 1], SEQ_LEN, pad_id=0, seed=0)
    packed.batch([0]).tokens[:] = -1
    assert packed.batch([0]).tokens.min() >= 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4))
def test_an_epoch_reads_every_sequence_once(n: int, seed: int, micro_batches: int, size: int) -> None:
    order, per_step = BatchOrder(n, seed), micro_batches * size
    read = np.concatenate([order.batch(step, micro_batches, size).ravel() for step in range(2 * n)])
    for epoch in range(2 * n * per_step // n):
        assert sorted(read[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_order_is_a_function_of_seed_and_step_alone() -> None:
    used = BatchOrder(10, seed=5)
    for step in range(50):
        used.batch(step, 2, 3)
    assert (BatchOrder(10, seed=5).batch(7, 2, 3) == used.batch(7, 2, 3)).all()
    assert (BatchOrder(10, seed=5).batch(7, 6, 1).ravel() == used.batch(7, 2, 3).ravel()).all()
    assert (BatchOrder(10, seed=6).batch(7, 2, 3) != used.batch(7, 2, 3)).any()


def test_epochs_become_steps_rounded_up() -> None:
    assert steps_of_epochs(1, 10, 4) == 3
    assert steps_of_epochs(0.5, 10, 5) == 1
    assert steps_of_epochs(0.001, 10, 5) == 1


def test_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        BatchOrder(0, seed=0)
