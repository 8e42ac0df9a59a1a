# SPDX-License-Identifier: Apache-2.0
"""LoRA runs: the same in every placement, equal to a loop in memory, exported, merged and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from reference_run import reference
from safetensors.numpy import load_file
from streamed_run import streamed_run

from memascend_jax.checkpoints.peft_adapter import open_adapter
from memascend_jax.config import load_config
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.adapters import is_adapter
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe.screen import Screen
from memascend_jax.recipes import finetune, planning
from memascend_jax.recipes.store_export import export_model
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.depths import Depths
from memascend_jax.units import round_up

pytestmark = pytest.mark.integration

STEPS = 3
LORA = ["lora.rank=4", "model.config.num_hidden_layers=4"]
EVERYWHERE = "lora.targets=[all-linear]"
NO_CLIP = "optimizer.clip_norm=null"


def trained(folder, *settings):
    """Trains and returns losses, the state's bits, what moved on SSD and what was planned to."""
    with streamed_run(folder, *settings, total_steps=STEPS) as run:
        layout = run.plan.layout
        own = {name: run.tensor(name).tobytes() for name in layout.frozen}
        assert own.keys() >= {name for name in run.names() if not is_adapter(name)}
        before = run.session.placement.io_bytes()
        losses = run.train(STEPS)
        moved = np.subtract(run.session.placement.io_bytes(), before)
        state = {
            each: run.tensor(each).tobytes()
            for name in run.names()
            for each in (name, *(name + leaf.suffix for leaf in layout.leaves_of(name)))
        }
        assert own.items() <= state.items()
        return losses, state, moved, run.plan


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ([EVERYWHERE], 2),
        ([NO_CLIP, "model.config.tie_word_embeddings=false", "lora.rslora=true"], 4),
        pytest.param(["model.compute_dtype=float16"], 3, marks=pytest.mark.slow),
        pytest.param([EVERYWHERE, NO_CLIP, "optimizer.state_format=int8"], 3, marks=pytest.mark.slow),
        pytest.param(
            ["optimizer.groups=[{match: 'layers[.][01][.]', frozen: true}]"], 2, marks=pytest.mark.slow
        ),
    ],
    ids=["exact", "in backward", "float16", "int8", "top layers"],
)
def test_adapters_train_the_same_everywhere_and_the_model_keeps_its_bits(
    tmp_path, monkeypatch, settings, slots
):
    monkeypatch.setattr(planning, "CHOICES", (Depths(1, slots, slots, 3, 1 << 14, 1 << 15),))
    placements = ("ssd", "host", "memory")
    made = {
        name: trained(tmp_path / name, *LORA, *settings, f"offload.placement={name}") for name in placements
    }
    for name in ("ssd", "host"):
        assert made[name][:2] == made["memory"][:2], name
    losses, _, moved, plan = made["ssd"]
    assert len(set(losses)) > 1
    # Commits write a catalog of a few blocks more, for all the small tensors, and nothing else is written than planned.
    written = moved[1] - STEPS * plan.ssd_write_bytes_per_step
    assert 0 < written <= STEPS << 16
    # Besides, the first forward is handed nothing, and reads what stays from then on.
    whole = sum(round_up(tensor.elements * 2, 4096) for tensor in plan.layout.tensors)
    assert moved[0] <= STEPS * plan.ssd_read_bytes_per_step + whole
    assert not made["host"][2].any()


def test_training_equals_a_loop_in_memory_that_differentiates_the_formula(tmp_path):
    with streamed_run(
        tmp_path,
        "lora.rank=4",
        EVERYWHERE,
        "model.config.num_hidden_layers=2",
        "lora.alpha=6",
        "model.compute_dtype=float32",
        "optimizer.learning_rate=1e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_norm=0.05",
        total_steps=6,
    ) as run:
        masters = {name: run.tensor(name) for name in run.names()}
        losses = run.train(6)
        factors = dict.fromkeys(filter(is_adapter, masters), 1.0)
        expected_losses, expected = reference(run, masters, "float32", 6, factors, lora_scale=1.5)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        for name in run.names():
            np.testing.assert_allclose(run.tensor(name), expected[name], rtol=0, atol=2e-6, err_msg=name)
            changed = not np.array_equal(run.tensor(name), masters[name])
            assert changed == is_adapter(name), name


def test_the_backward_ends_at_the_lowest_layer(tmp_path, monkeypatch):
    with streamed_run(tmp_path, *LORA, "offload.placement=ssd") as run:
        backward = run.backward_calls(monkeypatch)
        run.train(1)
        assert run.session.model.reach.lowest == 0
    # Two micro-batches through four layers, of which the lowest yields no gradient for what is below.
    assert backward == ["layer_backward"] * 6 + ["lowest_layer_backward"] * 2
    with TensorStore.open([tmp_path / "memascend.store"], direct_io="optional") as store:
        mutable = {name for name in store.names() if store.spec(name).mutable}
        assert {name.partition("#")[0] for name in mutable} == set(filter(is_adapter, store.names()))
        assert not store.spec(EMBED_NAME).mutable


def config(folder, *settings):
    fixed = [f"run.dir={folder}", "offload.direct_io=optional", "lora.rank=4", "train.steps=3"]
    return load_config(["tiny_random"], [*fixed, "optimizer.schedule=constant", *settings])


def weights(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(folder / "adapter_model.safetensors").items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is done, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    assert finetune.run(config(folder, "checkpoint.every=1", "checkpoint.keep=3")) == 0
    return folder


def test_a_run_leaves_an_adapter_and_its_checkpoint_and_store_give_the_same(finished, tmp_path):
    exported = weights(finished / "export")
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["trained_parameters"] == sum(len(value) for value in exported.values()) // 4
    with Screen() as screen:
        for name, source in (("of_run", finished), ("of_step", finished / "checkpoints")):
            facts = export_model([str(source)], tmp_path / name, screen)
            assert (facts["step"], facts["adapter"], facts["dtype"]) == (3, True, "float32")
            assert weights(tmp_path / name) == exported
            merged = tmp_path / f"{name}_merged"
            export_model([str(source)], merged, screen, merge=True, dtype="float32")
        with pytest.raises(ConfigError, match="has no adapters to merge"):
            export_model([str(merged)], tmp_path / "twice", screen, merge=True)
    one, other = (
        load_file(tmp_path / f"{name}_merged" / "model.safetensors") for name in ("of_run", "of_step")
    )
    with TensorStore.open([finished / "memascend.store"], read_only=True, direct_io="optional") as store:
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
            held = store.get(name).astype(np.float32)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in exported:
                a, b = (
                    np.frombuffer(exported[f"{module}.lora_{factor}.weight"], np.float32) for factor in "AB"
                )
                held = held + 2 * b.reshape(-1, 4) @ a.reshape(4, -1)
                assert np.abs(value - store.get(name).astype(np.float32)).max() > 0
            np.testing.assert_allclose(value, held, rtol=0, atol=1e-6)


def test_a_checkpoint_of_adapters_goes_on_and_is_no_model(finished, tmp_path):
    restored = config(tmp_path / "on", f"run.restore={finished / 'checkpoints' / '2'}")
    assert finetune.run(restored) == 0
    assert weights(tmp_path / "on" / "export") == weights(finished / "export")
    step = finished / "checkpoints" / "2"
    with pytest.raises(
        DataError, match=r"lora_A\.weight' is \[4, 64\] in the checkpoint, \[8, 64\] in the model"
    ):
        finetune.run(config(tmp_path / "wider", f"run.restore={step}", "lora.rank=8"))
    with pytest.raises(DataError, match=r"a checkpoint of LoRA adapters.*--merge"):
        finetune.run(config(tmp_path / "no", "lora.rank=0", f"model.source={step}", "model.config={}"))


def test_other_adapters_are_refused_by_the_keys_and_nothing_is_changed(finished):
    before = (finished / "memascend.store").read_bytes()
    longer = ["train.steps=4", "checkpoint.every=1"]
    for setting, said in (
        ("lora.alpha=3", r"lora\.alpha \(null → 3.0\)"),
        ("lora.targets=[o_proj]", r"lora\.targets \(\[\] → \[\"o_proj\"\]\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            finetune.run(config(finished, *longer, setting))
    for setting, said in (
        ("lora.rank=8", "with lora.rank=4, not 8"),
        ("lora.rank=0", "with lora.rank=4, not 0"),
        ("lora.targets=[o_proj]", r"4 tensors?.*o_proj|'.*o_proj\.lora_A\.weight' is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            finetune.run(config(finished, *longer, setting, "run.allow_changed=[lora]"))
    assert (finished / "memascend.store").read_bytes() == before


def test_an_adapter_is_trained_further(finished, tmp_path):
    source = f"lora.source={finished / 'export'}"
    with streamed_run(tmp_path / "next", "lora.rank=4", source) as run:
        adapter = open_adapter(finished / "export", run.plan.layout.config, run.plan.layout.adapters)
        for name in filter(is_adapter, run.names()):
            np.testing.assert_array_equal(run.tensor(name + "#master"), adapter.read(name))
            assert not run.tensor(name + "#mu").any()
        adapter.close()
    for wrong in ("lora.alpha=3", "lora.targets=[o_proj]", "lora.rslora=true", "model.config.hidden_size=32"):
        with pytest.raises(DataError, match="cannot use the adapter in"):
            finetune.run(config(tmp_path / "wrong", source, wrong))
    assert not (tmp_path / "wrong").exists()
