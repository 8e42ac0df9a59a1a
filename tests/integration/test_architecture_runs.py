# SPDX-License-Identifier: Apache-2.0
"""A folder of each kind of architecture is trained, sampled from and exported: the same wherever its state lies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import architecture_checks
import numpy as np
import pytest
from safetensors.numpy import load_file
from streamed_run import streamed_run
from tiny_architectures import VARIANTS, tiny_batch, tiny_weight
from tiny_checkpoints import write_folder

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes.inputs import open_model
from memascend_jax.training.generate import generate_greedy

pytestmark = pytest.mark.integration

STEPS = 3
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2])


@dataclass
class Trained:
    """What three steps made of a folder."""

    losses: list[float]
    texts: list[list[int]]
    tensors: dict[str, np.ndarray]
    exported: Path


#: Compiling takes most of the time; what these two have, others have as well.
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-window-yarn", "mistral")]


@pytest.fixture(scope="module", params=["gemma3", "phi4-mini", *_SLOW])
def runs(request, tmp_path_factory):
    """The folder of a model, and it trained with its state on SSD and in memory."""
    base = tmp_path_factory.mktemp(request.param)
    config = {**VARIANTS[request.param], "vocab_size": 288}
    tensors = {
        t.name: tiny_weight(t.name, t.shape, config) for t in tensor_shapes(ModelConfig.from_hf(config))
    }
    folder = write_folder(base / "model", config, tensors)
    return folder, {placement: trained(base, folder, placement) for placement in ("ssd", "memory")}


def trained(base: Path, folder: Path, placement: str) -> Trained:
    settings = (
        f"model.source={folder}",
        "model.config={}",
        "model.compute_dtype=float32",
        "data.seq_len=48",
        f"offload.placement={placement}",
    )
    with streamed_run(base / placement, *settings, total_steps=STEPS) as run:
        losses = run.train(STEPS)
        texts = generate_greedy(run.session.model, PROMPTS, max_new_tokens=12, stop_ids=())
        leaves = ["", *(leaf.suffix for leaf in run.plan.layout.format.leaves)]
        tensors = {name + leaf: run.tensor(name + leaf) for name in run.names() for leaf in leaves}
        model = open_model(run.config)
        out = base / f"{placement}-export"
        export_huggingface(
            run.session.placement.read,
            run.plan.layout.tensors,
            "float32",
            model.config,
            model.export_files(),
            out,
        )
        model.close()
    return Trained(losses, texts, tensors, out)


def test_state_on_ssd_and_in_memory_trains_bit_for_bit_the_same(runs):
    on_ssd, in_memory = runs[1]["ssd"], runs[1]["memory"]
    assert on_ssd.losses == in_memory.losses
    assert on_ssd.texts == in_memory.texts
    assert on_ssd.tensors.keys() == in_memory.tensors.keys()
    for name, value in on_ssd.tensors.items():
        assert value.tobytes() == in_memory.tensors[name].tobytes(), name


def test_every_tensor_is_trained_and_exported_under_its_name(runs):
    folder, placements = runs
    before, after = (load_file(path / "model.safetensors") for path in (folder, placements["ssd"].exported))
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert not np.array_equal(value, before[name]), f"{name} is as it was"
        np.testing.assert_array_equal(value, placements["ssd"].tensors[name])


def test_the_configuration_is_passed_on(runs):
    folder, placements = runs
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, placements["ssd"].exported)
    )
    assert after == {**before, "dtype": "float32", "torch_dtype": "float32"}


def test_transformers_computes_the_same_of_an_export(runs):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    out = runs[1]["ssd"].exported
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    batch = tiny_batch()
    tokens = torch.from_numpy(batch.tokens[:1].astype(np.int64))
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    ours = architecture_checks.build_from(
        json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    )
    row = (batch.tokens[:1], batch.positions[:1], batch.segments[:1])
    np.testing.assert_allclose(ours.logits(*row), expected, rtol=0, atol=2e-5)
