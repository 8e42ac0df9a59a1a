# SPDX-License-Identifier: Apache-2.0
"""Streamed training trains the same as an in-memory loop, and the same wherever the state lives."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from reference_run import reference
from streamed_run import streamed_run

from memascend_jax.recipes import planning
from memascend_jax.training.depths import Depths

pytestmark = pytest.mark.integration

STEPS = 20
#: Uneven vocabulary, rows that are no whole blocks.
SHAPE = ["model.config.vocab_size=500", "model.config.hidden_size=96", "model.config.num_hidden_layers=4"]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_float32_training_equals_an_in_memory_optax_loop(tmp_path, tied):
    with streamed_run(
        tmp_path,
        *SHAPE,
        f"model.config.tie_word_embeddings={tied}",
        "model.compute_dtype=float32",
        "optimizer.learning_rate=1e-4",
        "optimizer.weight_decay=0.1",
        total_steps=STEPS,
    ) as run:
        masters = {name: run.tensor(name) for name in run.names()}
        losses = run.train(STEPS)
        expected_losses, expected = reference(run, masters, "float32", STEPS)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        for name in run.names():
            np.testing.assert_allclose(run.tensor(name), expected[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_bfloat16_training_follows_an_in_memory_loop_with_our_rounding(tmp_path, tied):
    with streamed_run(
        tmp_path,
        *SHAPE,
        f"model.config.tie_word_embeddings={tied}",
        "model.compute_dtype=bfloat16",
        total_steps=STEPS,
    ) as run:
        masters = {name: run.tensor(name + "#master") for name in run.names()}
        losses = run.train(STEPS)
        expected_losses, _ = reference(run, masters, "bfloat16", STEPS)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    """Returns what trains in memory under the given settings, each once: losses, and tensors by name.

    The tiling is part of the key, as the norm of a head's gradient is summed over its tiles.
    """

    @functools.cache
    def train(choices, *overrides):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "CHOICES", choices)
            folder = tmp_path_factory.mktemp("memory")
            with streamed_run(folder, *overrides, "offload.placement=memory", total_steps=STEPS) as run:
                losses = run.train(STEPS)
                return losses, all_tensors(run)

    return train


def all_tensors(run):
    leaves = ["", *(leaf.suffix for leaf in run.plan.layout.format.leaves)]
    return {name + leaf: run.tensor(name + leaf) for name in run.names() for leaf in leaves}


@pytest.mark.parametrize("placement", ["ssd", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_state_on_ssd_and_in_memory_trains_bit_for_bit_the_same(tmp_path, in_memory, dtype, tied, placement):
    settings = [*SHAPE, f"model.config.tie_word_embeddings={tied}", f"model.compute_dtype={dtype}"]
    with streamed_run(tmp_path, *settings, f"offload.placement={placement}", total_steps=STEPS) as run:
        losses = run.train(STEPS)
        assert_same_bits((losses, all_tensors(run)), in_memory(planning.CHOICES, *settings))


#: Nothing is a whole page, block or tile: 101 rows of 92 or 184 bytes, sequences of 37 tokens.
ODD = [
    "model.config.vocab_size=101",
    "model.config.hidden_size=46",
    "model.config.intermediate_size=77",
    "model.config.num_attention_heads=1",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=46",
    "model.config.num_hidden_layers=3",
    "data.seq_len=37",
    "train.micro_batch_size=3",
]


@pytest.mark.parametrize("placement", ["ssd", "host"])
@pytest.mark.parametrize("update", ["exact", "in_backward"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_sizes_that_are_no_multiple_of_anything_change_no_bit(
    tmp_path, monkeypatch, in_memory, tied, update, placement
):
    small = (Depths(1, 2, 2, 3, 1 << 12, 1 << 13, spill_inputs=placement == "ssd"),)
    settings = [*ODD, f"model.config.tie_word_embeddings={tied}", "optimizer.clip_norm=null"]
    monkeypatch.setattr(planning, "CHOICES", small)
    with streamed_run(
        tmp_path,
        *settings,
        f"offload.placement={placement}",
        f"offload.update={update}",
        total_steps=STEPS,
    ) as run:
        assert run.plan.layout.n_head_tiles == 1 and len(run.plan.layout.update_groups) > 10
        losses = run.train(STEPS)
        got = losses, all_tensors(run)
    assert_same_bits(got, in_memory((plain(small[0]),), *settings))


@pytest.mark.parametrize(
    ("gradient_groups", "state_groups", "layer_slots", "spill_inputs"),
    [(0, 0, 2, True), (5, 0, 2, False), (99, 0, 4, False), (3, 4, 3, True), (0, 99, 4, False)],
    ids=["nothing", "gradients", "gradients and layers", "some of each", "everything but inputs"],
)
def test_what_stays_in_memory_changes_no_bit(
    tmp_path, monkeypatch, in_memory, gradient_groups, state_groups, layer_slots, spill_inputs
):
    small = Depths(
        prefetch_depth=1,
        layer_slots=layer_slots,
        head_slots=2,
        update_depth=3,
        tile_elements=1 << 14,
        head_tile_bytes=1 << 15,
        gradient_groups=gradient_groups,
        state_groups=state_groups,
        spill_inputs=spill_inputs,
    )
    monkeypatch.setattr(planning, "CHOICES", (small,))
    settings = [*SHAPE, "model.config.tie_word_embeddings=true", "model.config.vocab_size=900"]
    with streamed_run(tmp_path, *settings, "offload.placement=ssd", total_steps=STEPS) as run:
        assert len(run.plan.layout.update_groups) > 20
        assert run.plan.layout.n_head_tiles > 2
        before = run.session.placement.io_bytes()
        losses = run.train(1)
        first = run.session.placement.io_bytes()
        losses += run.train_from(2, STEPS)
        got = losses, {name: run.tensor(name) for name in run.names()}
        moved = np.subtract(run.session.placement.io_bytes(), first) / (STEPS - 1)
        assert before <= first
        # The plan counts all rows of a step as different ones. The update before the second step was waited
        # for, so that its forward reads all parameters.
        planned = run.plan.ssd_read_bytes_per_step, run.plan.ssd_write_bytes_per_step
        assert moved[0] <= 1.02 * planned[0] + 2 * run.plan.layout.n_parameters / (STEPS - 1)
        assert moved[1] == pytest.approx(planned[1], rel=0.02)
    assert_same_bits(got, in_memory((plain(small),), *settings))


@pytest.mark.parametrize("spill_inputs", [True, False])
def test_accumulating_over_more_micro_batches_than_slots_reads_no_more_parameters(
    tmp_path, monkeypatch, in_memory, spill_inputs
):
    small = Depths(1, 2, 2, 3, 1 << 14, 1 << 15, spill_inputs=spill_inputs)
    monkeypatch.setattr(planning, "CHOICES", (small,))
    settings = [*SHAPE, "model.config.tie_word_embeddings=true", "model.config.vocab_size=900"]
    read: dict[int, int] = {}
    for micro_batches in (1, 8):
        accumulation = f"train.gradient_accumulation_steps={micro_batches}"
        with streamed_run(tmp_path / str(micro_batches), *settings, accumulation, total_steps=STEPS) as run:
            assert run.plan.depths.spill_inputs == spill_inputs
            losses = run.train(1)
            before = run.session.placement.io_bytes()[0]
            losses += run.train_from(2, STEPS)
            read[micro_batches] = run.session.placement.io_bytes()[0] - before
            read[micro_batches] -= run.plan.spilled_bytes * (STEPS - 1)
            got = losses, all_tensors(run)
    # What is more are rows of the embedding, in whole blocks; a layer's parameters have 220 KB.
    table = 900 * 96 * 2
    assert read[8] - read[1] <= 1.25 * table * (STEPS - 1)
    assert_same_bits(got, in_memory((plain(small),), *settings, accumulation))


@pytest.mark.parametrize("update", ["in_backward", "exact"])
@pytest.mark.parametrize("placement", ["ssd", "host"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_updating_in_the_backward_changes_no_bit(tmp_path, monkeypatch, in_memory, tied, placement, update):
    small = Depths(1, 2, 2, 3, 1 << 14, 1 << 15)
    monkeypatch.setattr(planning, "CHOICES", (small,))
    settings = [*SHAPE, f"model.config.tie_word_embeddings={tied}", "optimizer.clip_norm=null"]
    with streamed_run(
        tmp_path,
        *settings,
        f"offload.placement={placement}",
        f"offload.update={update}",
        total_steps=STEPS,
    ) as run:
        assert run.plan.depths.early_update == (update == "in_backward")
        losses = run.train(1)
        first = run.session.placement.io_bytes()
        losses += run.train_from(2, STEPS)
        got = losses, all_tensors(run)
        moved = np.subtract(run.session.placement.io_bytes(), first) / (STEPS - 1)
        if (placement, update) == ("ssd", "in_backward"):
            # All rows are planned as different ones; the reading of all tensors here is 1/19 of the state.
            state = run.plan.layout.n_parameters * run.plan.layout.format.stored_bytes / (STEPS - 1)
            assert moved[0] <= 1.02 * run.plan.ssd_read_bytes_per_step + 1.1 * state
            assert moved[1] == pytest.approx(run.plan.ssd_write_bytes_per_step, rel=0.02)
        if placement == "host":
            assert not moved.any()
    assert_same_bits(got, in_memory((small,), *settings))


def plain(depths):
    """The same tiling with nothing kept or spilled, which the reference does not know."""
    return Depths(1, 2, 2, 3, depths.tile_elements, depths.head_tile_bytes)


def assert_same_bits(streamed, memory):
    assert streamed[0] == memory[0]
    for name, value in streamed[1].items():
        assert value.tobytes() == memory[1][name].tobytes(), name
