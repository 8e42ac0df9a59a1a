# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: read-only in one place, without state, gradient or write, and what is left trains as it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from reference_run import reference
from safetensors.numpy import load_file
from streamed_run import streamed_run

from memascend_jax.checkpoints.random_init import random_pieces
from memascend_jax.config import load_config
from memascend_jax.errors import ConfigError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, tensor_shapes
from memascend_jax.optim.rounding import round_master
from memascend_jax.optim.state_format import itemsize
from memascend_jax.recipes import finetune, planning
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.depths import Depths
from memascend_jax.training.residency import early_tensors
from memascend_jax.training.step_traffic import _row_bytes
from memascend_jax.units import round_up

pytestmark = pytest.mark.integration

STEPS = 3
SHAPE = ["model.config.vocab_size=500", "model.config.hidden_size=96", "model.config.num_hidden_layers=4"]
BOTTOM = "[{match: 'embed|layers[.][01][.]', frozen: true}]"
LAYERS_APART = "[{match: 'layers[.][03][.]|layers[.]1[.]mlp|norm', frozen: true}]"
ONLY_HEAD = "[{match: lm_head}, {match: '.', frozen: true}]"
ONLY_NORM = "[{match: '^model[.]norm'}, {match: '.', frozen: true}]"
NOT_TABLE = "[{match: 'embed|lm_head', frozen: true}]"
NO_CLIP = "optimizer.clip_norm=null"
FLOAT16 = "model.compute_dtype=float16"


def bits(run):
    names = {
        name: [name, *(name + leaf.suffix for leaf in run.plan.layout.leaves_of(name))]
        for name in run.names()
    }
    return {each: run.tensor(each).tobytes() for name in names for each in names[name]}


def trained(folder, *settings):
    """Trains and returns losses, the state's bits, what moved on SSD, and what was planned to."""
    with streamed_run(folder, *settings, total_steps=STEPS) as run:
        before = {name: run.tensor(name).tobytes() for name in run.plan.layout.frozen}
        counted = run.session.placement.io_bytes()
        losses = run.train(STEPS)
        moved = np.subtract(run.session.placement.io_bytes(), counted)
        state = bits(run)
        for name, value in before.items():
            assert state[name] == value, name
        return losses, state, moved, *planned_bytes(run)


def planned_bytes(run):
    """Returns the planned reads and writes of a run of ``STEPS``, and by how much the reads may be fewer."""
    layout, plan = run.plan.layout, run.plan
    early = early_tensors(layout) if plan.depths.early_update else frozenset()
    parts = [part for key in layout.stage_parts for part in layout.trained_parts(key)]

    def parameters(of):
        sizes = (part.n_elements * itemsize(layout.format.param_dtype) for part in parts if of(part.tensor))
        return sum(round_up(nbytes, 4096) for nbytes in sizes)

    # The first forward is handed nothing, and reads what stays from then on. Rows are planned as all different, and
    # layers that are updated in the backward as read again, which a forward that comes before their turn need not.
    reads = STEPS * plan.ssd_read_bytes_per_step + parameters(lambda tensor: tensor not in early)
    staying = run.session.model._staying.keys
    reads += sum(
        round_up(part.n_elements * itemsize(layout.format.param_dtype), 4096)
        for key in staying
        for part in layout.stage_parts[key]
        if not layout.is_trained(part.tensor)
    )
    assert staying == frozenset(run.session.model._staying.loaded)
    if layout.is_trained(EMBED_NAME):
        # Nor its rows, which later ones have from the update.
        table = math.prod(layout.shape_of(EMBED_NAME)) * itemsize(layout.format.param_dtype)
        reads += round_up(table, 4096)
    rows = _row_bytes(layout, 4 * run.config.data.seq_len)
    fewer = (STEPS + 1) * (rows + parameters(lambda tensor: tensor in early))
    return (reads, STEPS * plan.ssd_write_bytes_per_step), fewer


@pytest.mark.parametrize(
    ("groups", "settings", "tied", "slots"),
    [
        (BOTTOM, [], "false", 3),
        (LAYERS_APART, [NO_CLIP], "false", 4),
        (NOT_TABLE, [NO_CLIP, "optimizer.state_format=int8"], "true", 2),
        (ONLY_HEAD, [], "false", 2),
        pytest.param(BOTTOM, [NO_CLIP], "false", 2, marks=pytest.mark.slow),
        pytest.param(BOTTOM, ["optimizer.state_format=split"], "true", 4, marks=pytest.mark.slow),
        pytest.param(LAYERS_APART, [], "true", 3, marks=pytest.mark.slow),
        pytest.param(LAYERS_APART, [FLOAT16], "true", 2, marks=pytest.mark.slow),
        pytest.param(ONLY_NORM, [NO_CLIP], "true", 4, marks=pytest.mark.slow),
        pytest.param(NOT_TABLE, [], "false", 4, marks=pytest.mark.slow),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else str(value)[:24],
)
def test_frozen_tensors_keep_their_bits_and_the_rest_trains_the_same_everywhere(
    tmp_path, monkeypatch, groups, settings, tied, slots
):
    monkeypatch.setattr(planning, "CHOICES", (Depths(1, slots, slots, 3, 1 << 14, 1 << 15),))
    common = [*SHAPE, *settings, f"model.config.tie_word_embeddings={tied}", f"optimizer.groups={groups}"]
    placements = ("ssd", "host", "memory")
    made = {name: trained(tmp_path / name, *common, f"offload.placement={name}") for name in placements}
    for name in ("ssd", "host"):
        assert made[name][:2] == made["memory"][:2], name
    assert len(set(made["ssd"][0])) > 1
    _, _, moved, planned, fewer = made["ssd"]
    # Commits write a catalog of a few blocks.
    assert planned[0] - fewer <= moved[0] <= planned[0]
    assert 0 < moved[1] - planned[1] <= STEPS << 15
    assert not made["host"][2].any()


@pytest.mark.parametrize(
    ("groups", "tied"),
    [
        (BOTTOM, "false"),
        (LAYERS_APART, "true"),
        pytest.param(BOTTOM, "true", marks=pytest.mark.slow),
        pytest.param(LAYERS_APART, "false", marks=pytest.mark.slow),
        pytest.param(NOT_TABLE, "true", marks=pytest.mark.slow),
        pytest.param(NOT_TABLE, "false", marks=pytest.mark.slow),
    ],
)
def test_training_beside_frozen_tensors_equals_an_optax_loop_with_set_to_zero(tmp_path, groups, tied):
    """The loop's clip sees the norm of what is trained alone: a norm of all gradients would give other steps."""
    with streamed_run(
        tmp_path,
        *SHAPE,
        f"model.config.tie_word_embeddings={tied}",
        f"optimizer.groups={groups}",
        "model.compute_dtype=float32",
        "optimizer.learning_rate=1e-4",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_norm=0.05",
        total_steps=20,
    ) as run:
        masters = {name: run.tensor(name) for name in run.names()}
        losses = run.train(20)
        factors = {name: 1.0 for name in run.names() if name not in run.plan.layout.frozen}
        expected_losses, expected = reference(run, masters, "float32", 20, factors)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        for name in run.names():
            np.testing.assert_allclose(run.tensor(name), expected[name], rtol=0, atol=1e-6, err_msg=name)
            assert (name in run.plan.layout.frozen) == np.array_equal(run.tensor(name), masters[name]), name


def test_a_frozen_bottom_costs_no_state_no_stage_inputs_and_no_backward(tmp_path, monkeypatch):
    settings = [*SHAPE, "model.config.tie_word_embeddings=false", "offload.placement=ssd"]
    kept = []
    with streamed_run(tmp_path / "all", *settings) as run:
        whole = run.plan
    with streamed_run(tmp_path / "top", *settings, f"optimizer.groups={BOTTOM}") as run:
        backward = run.backward_calls(monkeypatch)
        put = run.session.model._inputs.put
        monkeypatch.setattr(run.session.model._inputs, "put", lambda xs: (kept.append(len(xs)), put(xs)))
        run.train(1)
        plan = run.plan
    # Two micro-batches each of the layers 3 and 2; nothing needs the gradient of the latter's input.
    assert backward == ["layer_backward"] * 2 + ["lowest_layer_backward"] * 2
    assert kept == [2, 2]
    with TensorStore.open([tmp_path / "top" / "memascend.store"], direct_io="optional") as store:
        frozen = plan.layout.frozen
        assert len(frozen) == 19
        assert {name for name in store.names() if not store.spec(name).mutable} == frozen
        assert not [name for name in store.names() if name.partition("#")[0] in frozen and "#" in name]
        assert not store.verify().faults
    half, full = (
        {
            tensor.name: round_up(tensor.elements * size, 4096)
            for tensor in plan.layout.tensors
            if tensor.name in frozen
        }
        for size in (2, 4)
    )
    # A step's parameters, masters and moments; the gradients, of which those of the embedding are rows.
    written = sum(half.values()) + 3 * sum(full.values())
    spooled = sum(half.values()) - half[EMBED_NAME]
    assert whole.ssd_write_bytes_per_step - plan.ssd_write_bytes_per_step == written + spooled
    # Two places of that, but for the parameters' one that stays; scratch for gradients, as large; and in the catalog.
    saved = whole.disk_bytes - plan.disk_bytes - 2 * written
    assert 0 <= saved < 1 << 20
    assert whole.memory.total_bytes > plan.memory.total_bytes


def config(folder, *settings):
    return load_config(["tiny_random"], [f"run.dir={folder}", "offload.direct_io=optional", *settings])


def test_a_resume_with_other_frozen_tensors_is_refused_by_their_names(tmp_path):
    frozen = "optimizer.groups=[{match: 'layers[.]0[.]', frozen: true}]"
    assert finetune.run(config(tmp_path, frozen, "train.steps=2")) == 0
    longer = ["train.steps=3", "run.allow_changed=[optimizer.groups]"]
    before = (tmp_path / "memascend.store").read_bytes()
    with pytest.raises(
        ConfigError, match=r"9 tensors frozen in it would be trained.*'model\.layers\.0\.input"
    ):
        finetune.run(config(tmp_path, *longer))
    more = "optimizer.groups=[{match: 'layers[.][01][.]', frozen: true}]"
    with pytest.raises(
        ConfigError, match=r"9 tensors trained in it would be frozen.*'model\.layers\.1\.input"
    ):
        finetune.run(config(tmp_path, *longer, more))
    assert (tmp_path / "memascend.store").read_bytes() == before
    # Another way to say the same is the same.
    same = "optimizer.groups=[{match: '^model[.]layers[.]0', frozen: true}]"
    assert finetune.run(config(tmp_path, *longer, same)) == 0
    export = load_file(tmp_path / "export" / "model.safetensors")
    shape = ModelConfig.from_hf(config(tmp_path).model.config)
    for tensor in tensor_shapes(shape):
        ((_, values),) = random_pieces(shape, tensor.name, seed=0)
        unchanged = export[tensor.name].tobytes() == round_master(values, "bfloat16").tobytes()
        # Norms begin at 1, from which three small steps round back.
        assert unchanged == tensor.name.startswith("model.layers.0.") or len(tensor.shape) == 1, tensor.name


def test_all_frozen_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="freezes all 29 tensors"):
        finetune.run(config(tmp_path / "run", "optimizer.groups=[{match: '.', frozen: true}]"))
    assert not (tmp_path / "run").exists()
