# SPDX-License-Identifier: Apache-2.0
"""Norms of stages and the noise scale in the metrics, against those of an independent model's gradients in numpy."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import plain_llama
import pytest
from reference_run import reference
from streamed_run import streamed_run

from memascend_jax.config import load_config
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.report import read_run
from memascend_jax.observe.report_files import write_report
from memascend_jax.recipes import finetune

pytestmark = pytest.mark.integration

LOGGED = ["optimizer.log_norms=true", "optimizer.log_noise_scale=true", "train.gradient_accumulation_steps=3"]
#: fp32 gradients of two implementations; the estimates are differences of norms.
TOLERANCE = 1e-4


def square(gradients, names):
    return sum(float(np.square(np.asarray(gradients[name], np.float64)).sum()) for name in names)


@pytest.mark.parametrize(
    ("tied", "groups", "settings"),
    [
        ("true", "[]", ["model.compute_dtype=float32"]),
        ("false", "[{match: 'embed|layers[.]0[.]', frozen: true}]", ["model.compute_dtype=float32"]),
    ],
)
def test_norms_and_noise_are_those_of_whole_gradients(tmp_path, tied, groups, settings):
    tie = f"model.config.tie_word_embeddings={tied}"
    with streamed_run(tmp_path, *LOGGED, tie, f"optimizer.groups={groups}", *settings) as run:
        layout, batches = run.plan.layout, run.data.of_step(1)
        masters = {name: run.tensor(name) for name in run.names()}
        result = run.session.train_step(1, batches, run.data.of_step(2))
        run.session.placement.finish_update()
    gradients_of = plain_llama.gradient_function(layout.config, "float32")
    tokens = [float(batch.weights.sum()) for batch in batches]
    parts = [gradients_of(masters, dataclasses.asdict(batch), sum(tokens))[1] for batch in batches]
    total = {name: sum(np.asarray(part[name], np.float64) for part in parts) for name in masters}
    stages = {}
    for tensor in layout.trained:
        stages.setdefault(tensor.stage, []).append(tensor.name)
    expected = {stage: square(total, names) ** 0.5 for stage, names in stages.items()}
    assert result.stage_norms == pytest.approx(expected, rel=TOLERANCE)
    assert result.grad_norm == pytest.approx(sum(norm**2 for norm in expected.values()) ** 0.5, rel=TOLERANCE)
    counted = [tensor.name for tensor in layout.trained if tensor.name != EMBED_NAME]
    n, big = sum(tokens), square(total, counted)
    # Mean gradients of the micro-batches scatter around the step's.
    means = [
        {name: np.asarray(part[name], np.float64) * n / own for name in counted}
        for part, own in zip(parts, tokens, strict=True)
    ]
    scattered = sum(own / n * square(mean, counted) for mean, own in zip(means, tokens, strict=True))
    assert result.noise.trace == pytest.approx((scattered - big) * n / 2, rel=10 * TOLERANCE)
    assert result.noise.square == pytest.approx((3 * big - scattered) / 2, rel=10 * TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_asking_for_them_changes_no_bit_of_the_training(tmp_path, dtype):
    made = {}
    for name, asked in (("plain", LOGGED[2:]), ("logged", LOGGED)):
        with streamed_run(tmp_path / name, *asked, f"model.compute_dtype={dtype}") as run:
            losses = run.train(3)
            made[name] = losses, {name: run.tensor(name).tobytes() for name in run.names()}
    assert made["plain"] == made["logged"]


def test_a_run_writes_them_and_its_report_draws_them(tmp_path):
    config = load_config(
        ["tiny_random"], [f"run.dir={tmp_path}", "offload.direct_io=optional", "run.export=false", *LOGGED]
    )
    assert finetune.run(config) == 0
    lines = read_lines(tmp_path / "metrics.jsonl")
    for line in lines:
        norms = [line["grad_norms"]["embed"], *line["grad_norms"]["layers"], line["grad_norms"]["head"]]
        assert len(norms) == 5
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-3)
        assert {"noise_trace", "noise_grad_square", "noise_scale"} <= line.keys()
    assert json.loads((tmp_path / "summary.json").read_text())["noise_scale"] == lines[-1]["noise_scale"]
    write_report(read_run(tmp_path), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Gradient norm" in page and "Gradient noise scale" in page


def test_layer_decay_equals_an_optax_loop_with_a_rate_per_layer(tmp_path):
    with streamed_run(
        tmp_path,
        "model.compute_dtype=float32",
        "model.config.tie_word_embeddings=false",
        "optimizer.weight_decay=0.1",
        "optimizer.learning_rate=1e-4",
        "optimizer.layer_decay=0.6",
        "optimizer.groups=[{match: 'layers[.]1[.]mlp', learning_rate: 3e-5, weight_decay: 0.1}]",
        total_steps=20,
    ) as run:
        masters = {name: run.tensor(name) for name in run.names()}
        losses = run.train(20)
        powers = {"embed": 4, "layer.0": 3, "layer.1": 2, "layer.2": 1, "head": 0}
        factors = {tensor.name: 0.6 ** powers[tensor.stage] for tensor in run.plan.layout.tensors}
        for name in factors:
            factors[name] *= 0.3 if "layers.1.mlp" in name else 1.0
        expected_losses, expected = reference(run, masters, "float32", 20, factors)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        for name in run.names():
            np.testing.assert_allclose(run.tensor(name), expected[name], rtol=0, atol=1e-6, err_msg=name)
