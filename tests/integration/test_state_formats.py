# SPDX-License-Identifier: Apache-2.0
"""Compact state formats train the same wherever the state lives and however it is cut, and split as fp32 does."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from streamed_run import streamed_run

from memascend_jax.observe.metrics import read_lines
from memascend_jax.optim.state_format import STATE_FORMATS
from memascend_jax.recipes import planning
from memascend_jax.training.depths import Depths

pytestmark = pytest.mark.integration

STEPS = 6
#: Rows of 96 elements: blocks of scales begin within rows and go across them; several tiles, the last one shorter.
SHAPE = ["model.config.vocab_size=900", "model.config.hidden_size=96", "model.config.num_hidden_layers=3"]
SMALL = Depths(1, 2, 2, 3, 1 << 14, 1 << 15)
COMPACT = [name for name in STATE_FORMATS if name != "fp32"]


def all_tensors(run):
    leaves = ["", *(leaf.suffix for leaf in run.plan.layout.format.leaves)]
    return {name + leaf: run.tensor(name + leaf) for name in run.names() for leaf in leaves}


def trained(folder, *overrides, steps=STEPS):
    with streamed_run(folder, *SHAPE, *overrides, total_steps=steps) as run:
        before = run.session.placement.io_bytes()
        losses = run.train(1)
        first = run.session.placement.io_bytes()
        losses += run.train_from(2, steps)
        moved = np.subtract(run.session.placement.io_bytes(), first) / (steps - 1)
        assert before <= first
        return losses, all_tensors(run), run.plan, moved


@pytest.mark.parametrize("mode", ["exact", "in_backward", "host"])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("name", COMPACT)
def test_every_format_on_ssd_and_in_memory_trains_bit_for_bit_the_same(
    tmp_path, monkeypatch, name, tied, mode
):
    monkeypatch.setattr(planning, "CHOICES", (SMALL,))
    settings = [f"optimizer.state_format={name}", f"model.config.tie_word_embeddings={tied}"]
    where = "offload.placement=host" if mode == "host" else "offload.placement=ssd"
    if mode == "in_backward":
        settings += ["optimizer.clip_norm=null"]
    update = f"offload.update={'in_backward' if mode == 'in_backward' else 'exact'}"
    losses, tensors, plan, moved = trained(tmp_path / "streamed", *settings, where, update)
    assert len(plan.layout.update_groups) > 10
    assert len(set(losses)) == STEPS
    expected, kept, _, _ = trained(tmp_path / "memory", *settings, "offload.placement=memory")
    assert losses == expected
    for tensor, value in tensors.items():
        assert value.tobytes() == kept[tensor].tobytes(), tensor
    if mode == "host":
        return
    # All rows are planned as different ones; the update before the second step was waited for, so that its forward
    # reads all parameters.
    planned = plan.ssd_read_bytes_per_step, plan.ssd_write_bytes_per_step
    assert moved[0] <= 1.02 * planned[0] + 2 * plan.layout.n_parameters / (STEPS - 1)
    assert moved[1] == pytest.approx(planned[1], rel=0.02)


@pytest.mark.parametrize("placement", ["ssd", "memory"])
def test_split_gives_the_parameters_of_fp32_bit_for_bit(tmp_path, placement):
    where = f"offload.placement={placement}"
    losses, split, _, _ = trained(tmp_path / "split", where, "optimizer.state_format=split", steps=50)
    expected, fp32, _, _ = trained(tmp_path / "fp32", where, "optimizer.state_format=fp32", steps=50)
    assert losses == expected
    for tensor in (name for name in fp32 if "#" not in name or name.endswith(("#mu", "#nu"))):
        assert split[tensor].tobytes() == fp32[tensor].tobytes(), tensor


@pytest.mark.parametrize(
    ("name", "stored"), [("split", 12), ("split_bf16", 8), ("bf16", 6), ("int8", 5.03125)]
)
def test_a_plan_counts_the_bytes_of_the_format(tmp_path, name, stored):
    with streamed_run(tmp_path, *SHAPE, f"optimizer.state_format={name}", "offload.placement=ssd") as run:
        fmt = run.plan.layout.format
        assert fmt.stored_bytes == stored
        held = sum(
            int(np.prod(spec.shape)) * np.dtype(run.tensor(spec.name).dtype).itemsize
            for spec in run.plan.specs
        )
        # Padding of scales in tensors of several tiles, and groups that are not full.
        assert held == pytest.approx(run.plan.layout.n_parameters * stored, rel=0.02)


def command(folder, name, *overrides):
    settings = ["--config", "tiny_random", f"run.dir={folder}", "offload.direct_io=optional", "train.steps=8"]
    program = [sys.executable, "-m", "memascend_jax.recipes.llama_finetune"]
    return [*program, *settings, f"optimizer.state_format={name}", *overrides]


@pytest.mark.parametrize("name", ["split_bf16", "int8"])
def test_the_command_trains_in_a_format_goes_on_after_a_kill_and_refuses_another_one(tmp_path, name):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(command(whole, name), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["ssd_write_bytes_per_step"] > 0
    with subprocess.Popen(
        command(killed, name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        metrics = killed / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and len(read_lines(metrics)) >= 3):
            time.sleep(0.02)
        process.kill()
    other = command(killed, "fp32", "run.allow_changed=true")
    refused = subprocess.run(other, capture_output=True, text=True, timeout=200)
    assert refused.returncode == 2
    assert f"optimizer.state_format={name}, not fp32" in refused.stderr
    again = subprocess.run(command(killed, name), capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    exported = [(folder / "export" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert exported[0] == exported[1]
