# SPDX-License-Identifier: Apache-2.0
"""A run whose state is in host memory alone: the update beside the forward, how it fails, and what a stop keeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from streamed_run import streamed_run

from memascend_jax.observe.metrics import read_lines
from memascend_jax.training import update

pytestmark = [pytest.mark.integration, pytest.mark.timeout(250)]

#: With the update beside the next forward, and with that of the layers in the backward.
MODES = pytest.mark.parametrize(
    "mode",
    [["offload.update=exact"], ["offload.update=in_backward", "optimizer.clip_norm=null"]],
    ids=["exact", "in backward"],
)
STEPS = 4
#: More layers than have slots for their gradients: who waits for one must learn that none comes back.
DEEP = ["model.config.num_hidden_layers=12"]


def trained(folder, *overrides):
    with streamed_run(folder, *overrides, total_steps=STEPS) as run:
        losses = run.train(STEPS)
        return losses, {name: run.tensor(name).tobytes() for name in run.names()}


@MODES
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_forward_waits_for_an_update_that_is_slower(tmp_path, monkeypatch, mode, tied):
    settings = [*mode, f"model.config.tie_word_embeddings={tied}"]
    expected = trained(tmp_path / "memory", *settings, "offload.placement=memory")
    real = update.update_tile

    def slow(*args, **kwargs):
        time.sleep(0.01)
        real(*args, **kwargs)

    monkeypatch.setattr(update, "update_tile", slow)
    assert trained(tmp_path / "host", *settings, "offload.placement=host") == expected


def test_the_update_runs_beside_the_next_forward(tmp_path, monkeypatch):
    """The step returns while its update is under way, which a stage at the end of the forward waits for."""
    real, done = update.update_tile, []

    def slow(*args, **kwargs):
        time.sleep(0.02)
        real(*args, **kwargs)
        done.append(time.monotonic())

    with streamed_run(tmp_path, "offload.placement=host") as run:
        run.train(1)
        monkeypatch.setattr(update, "update_tile", slow)
        run.session.train_step(2, run.data.of_step(2), run.data.of_step(3))
        returned = time.monotonic()
        run.session.placement.finish_update()
        assert done[-1] > returned + 0.02


class BrokenError(Exception):
    pass


@MODES
def test_a_failing_update_is_raised_to_whoever_needs_it(tmp_path, monkeypatch, mode):
    calls = []
    real = update.update_tile

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise BrokenError("no more")
        real(*args, **kwargs)

    with pytest.raises(BrokenError), streamed_run(tmp_path, "offload.placement=host", *mode, *DEEP) as run:
        run.train(1)
        monkeypatch.setattr(run.session.placement, "overlaps_update", False)
        monkeypatch.setattr(update, "update_tile", failing)
        run.train_from(2, 3)


@MODES
def test_an_update_that_is_given_up_ends_at_once(tmp_path, monkeypatch, mode):
    real = update.update_tile

    def slow(*args, **kwargs):
        time.sleep(0.2)
        real(*args, **kwargs)

    began = 0.0
    with (
        pytest.raises(KeyboardInterrupt),
        streamed_run(tmp_path, "offload.placement=host", *mode, *DEEP) as run,
    ):
        run.train(1)
        monkeypatch.setattr(run.session.placement, "overlaps_update", False)
        monkeypatch.setattr(update, "update_tile", slow)
        run.session.train_step(2, run.data.of_step(2), run.data.of_step(3))
        began = time.monotonic()
        raise KeyboardInterrupt
    # A group of the tiny model is at most a few pieces; all of them would take longer.
    assert time.monotonic() - began < 0.2 * 12


def command(folder, *overrides):
    program = [sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"]
    return [*program, f"run.dir={folder}", "offload.placement=host", *overrides]


def test_the_command_trains_to_the_same_export_without_a_store(tmp_path):
    host = subprocess.run(command(tmp_path / "host"), capture_output=True, text=True, timeout=250)
    assert host.returncode == 0, host.stderr
    ssd = command(tmp_path / "ssd", "offload.placement=ssd", "offload.direct_io=optional")
    assert subprocess.run(ssd, capture_output=True, timeout=250).returncode == 0
    ours, theirs = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("host", "ssd"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert not (tmp_path / "host" / "memascend.store").exists()
    plan = json.loads((tmp_path / "host" / "plan.json").read_text())
    assert (plan["placement"], plan["durability"], plan["disk_bytes"]) == ("host", None, 0)
    lines = read_lines(tmp_path / "host" / "metrics.jsonl")
    assert all(line["ssd_read_bytes"] == line["ssd_write_bytes"] == 0 for line in lines)
    summary = json.loads((tmp_path / "host" / "summary.json").read_text())
    assert summary["host_peak_bytes"] <= summary["planned_host_bytes"]


def test_a_stop_keeps_the_model_and_says_that_the_run_cannot_go_on(tmp_path):
    folder = tmp_path / "run"
    child = subprocess.Popen(command(folder, "train.steps=100000"), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or not read_lines(folder / "metrics.jsonl"):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    # Not 75: that promises that the same command goes on.
    assert child.returncode == 1, said
    status = json.loads((folder / "status.json").read_text())
    kept = folder / f"export_step_{status['step']}"
    assert status["state"] == "stopped"
    assert "offload.placement=host keeps nothing on disk, so it cannot be resumed" in said
    assert f"The model as it is now is in {kept}" in said
    weights = load_file(kept / "model.safetensors")
    assert all(np.isfinite(value.astype(np.float32)).all() for value in weights.values())
    again = subprocess.run(command(folder), capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "cannot start a new run in run.dir" in again.stderr
