# SPDX-License-Identifier: Apache-2.0
"""Runs that save checkpoints: killed while they update in place they go back to one, and any run can begin with one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from killed_runs import EXACT, End, Runs, check_same, outcome
from safetensors.numpy import load_file

from memascend_jax.checkpoints.saved_step import find_steps, open_step
from memascend_jax.checkpoints.verify_step import verify_step
from memascend_jax.observe.metrics import read_lines
from memascend_jax.storage.tensor_store import TensorStore

pytestmark = pytest.mark.integration

IN_PLACE = ("offload.durability=checkpoint", "checkpoint.every=2", "checkpoint.keep=2", "train.steps=10")
#: Each in one process that goes on from what the one before left: in an update, in a save, around a step's removal.
ENDS: tuple[End, ...] = (
    ("chunk", 70, "before"),
    ("write", 60, "after"),
    ("step", 2, "before"),
)


def test_a_run_that_is_killed_while_it_updates_in_place_goes_back_to_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    with Runs(*IN_PLACE) as runs:
        runs.finish(whole)
        killed = killed_in_an_update(runs, tmp_path)
        logs = []
        for end in ENDS:
            assert runs.kill_at(killed, end), end
            logs.append(runs.log(killed).read_text())
        runs.finish(killed)
    assert "the store was being overwritten in place: going on from the checkpoint" in logs[0]
    check_same(killed, outcome(whole))
    assert find_steps(killed / "checkpoints") == find_steps(whole / "checkpoints") == [8, 10]
    assert len(list((killed / "checkpoints").iterdir())) == 2
    assert verify_step(open_step(killed / "checkpoints" / "10")).faults == ()


def test_without_a_checkpoint_a_store_that_was_overwritten_in_place_is_refused(tmp_path: Path) -> None:
    with Runs(*IN_PLACE, "checkpoint.every=5") as runs:
        folder = killed_in_an_update(runs, tmp_path)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
        status, message = runs.fail(folder)
        assert status == 6
        assert "mixture of two steps" in message
        assert f"no checkpoint to go back to either: there is none in '{folder}/checkpoints'" in message
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
        # One that is damaged is not used, and not overwritten by a new run either.
        good = tmp_path / "good"
        runs.finish(good, "train.steps=5")
        shutil.copytree(good / "checkpoints" / "5", folder / "checkpoints" / "5")
        next((folder / "checkpoints").rglob("c/0/0")).write_bytes(b"")
        status, message = runs.fail(folder)
        assert status == 6 and "none is whole" in message and "has 0 bytes instead of" in message
        (folder / "memascend.store").unlink()
        status, message = runs.fail(folder)
        assert status == 5 and "none is whole" in message


def killed_in_an_update(runs: Runs, tmp_path: Path) -> Path:
    """The folder of a run that was killed while its store held a mixture of two steps."""
    # Gradients go to the same disk at moments of their own: the number of a write is not always of the same.
    for number in range(264, 300, 2):
        folder = tmp_path / f"run{number}"
        assert runs.kill_at(folder, ("write", number, "before"))
        with TensorStore.open([folder / "memascend.store"], read_only=True, direct_io="optional") as store:
            if store.dirty:
                return folder
    raise AssertionError("never killed in an update")


def test_any_store_format_and_placement_goes_on_from_a_step_as_the_run_that_saved_it(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with Runs("train.steps=6", "train.eval_every=2", "data.eval_fraction=0.1") as runs:
        runs.finish(saved, "checkpoint.every=2", "checkpoint.keep=3", "checkpoint.keep_best=1")
        assert find_steps(saved / "checkpoints") == [2, 4, 6]
        step = saved / "checkpoints" / "4"
        expected = load_file(saved / "export" / "model.safetensors")
        lines = [{key: line[key] for key in EXACT} for line in read_lines(saved / "metrics.jsonl")]
        for number, setting in enumerate(
            (
                "offload.placement=memory",
                "optimizer.state_format=split",
                f"offload.store=[{tmp_path}/a,{tmp_path}/b]",
            )
        ):
            folder = tmp_path / f"restored{number}"
            runs.finish(folder, setting, f"run.restore={step}")
            restored = load_file(folder / "export" / "model.safetensors")
            assert all(restored[name].tobytes() == expected[name].tobytes() for name in expected)
            again = [{key: line[key] for key in EXACT} for line in read_lines(folder / "metrics.jsonl")]
            assert again == lines[4:]
        # The same command goes on with the complete run instead of beginning again.
        runs.finish(folder, setting, f"run.restore={step}")
        status, message = runs.fail(folder, setting, f"run.restore={saved / 'checkpoints' / '2'}")
        assert status == 2 and "would replace" in message
        status, message = runs.fail(tmp_path / "no", "run.restore=7")
        assert status == 5 and "has no step 7; the steps there are: none" in message
        status, message = runs.fail(tmp_path / "no", f"run.restore={step}", "model.config.hidden_size=32")
        assert status == 5 and "is of another model" in message
        status, message = runs.fail(tmp_path / "no", f"run.restore={step}", "train.steps=4")
        assert status == 2 and "nothing would be trained" in message
        assert not (tmp_path / "no").exists()


def test_a_run_in_memory_that_is_stopped_goes_on_from_the_checkpoint_of_its_stop(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = (
        "offload.placement=host",
        "train.steps=60",
        "checkpoint.every=25",
        "optimizer.state_format=int8",
    )
    with Runs(*settings) as runs:
        runs.finish(whole)
        runs.start(stopped)
        runs.wait_for_step(stopped, 3)
        runs.signal(signal.SIGTERM)
        assert runs.wait() == 75
        status = json.loads((stopped / "status.json").read_text())
        assert find_steps(stopped / "checkpoints") == [status["step"]]
        log = runs.log(stopped).read_text()
        assert f"the same command goes on from the checkpoint of step {status['step']}" in log
        runs.finish(stopped)
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (stopped, whole))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    exact = [
        [{k: line[k] for k in EXACT} for line in read_lines(f / "metrics.jsonl")] for f in (stopped, whole)
    ]
    assert exact[0] == exact[1]
