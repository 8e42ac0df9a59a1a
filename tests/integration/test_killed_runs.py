# SPDX-License-Identifier: Apache-2.0
"""The main job killed by SIGKILL at random and at chosen instants goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from killed_runs import End, Outcome, Runs, check_same, outcome

from memascend_jax.checkpoints.smollm2 import smollm2_135m_path
from memascend_jax.errors import MemascendError
from memascend_jax.observe.metrics import read_lines

pytestmark = pytest.mark.integration

#: A process needs about 0.4 s for its first step, then 35 ms each.
_LONGEST_LIFE_S = 1.0
VARIANTS: dict[str, Sequence[str]] = {
    "exact, gradients on SSD": (),
    "in the backward": ("optimizer.clip_norm=null",),
    "gradients and state in memory": ("offload.host_memory=1GiB",),
    "float16": ("model.compute_dtype=float16", "optimizer.loss_scale=dynamic"),
    "int8": ("optimizer.state_format=int8",),
    "in place, with checkpoints": ("offload.durability=checkpoint", "checkpoint.every=4"),
    "evaluation": ("train.eval_every=3", "train.gradient_accumulation_steps=3"),
}
#: Each in one process that goes on from what the one before left: around a commit, a line, a file.
ENDS: Sequence[End] = (
    ("line", 2, "within"),
    ("flush", 9, "before"),
    ("line", 2, "after"),
    ("flush", 7, "after"),
    ("write", 60, "before"),
    ("file", 4, "before"),
)


def runs_of(variant: str, *settings: str) -> Runs:
    # So large a scale overflows for some steps, which are skipped.
    scale = 2.0**32 if variant == "float16" else None
    return Runs(*VARIANTS[variant], *settings, initial_scale=scale)


def test_a_run_that_is_killed_at_its_writes_flushes_lines_and_files_goes_on(tmp_path: Path) -> None:
    with runs_of("evaluation", "train.steps=12") as runs:
        runs.finish(tmp_path / "whole")
        for end in ENDS:
            assert runs.kill_at(tmp_path / "killed", end), end
        runs.finish(tmp_path / "killed")
    check_same(tmp_path / "killed", outcome(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("variant", "least_kills"), [(name, 40 if index else 100) for index, name in enumerate(VARIANTS)]
)
def test_a_run_that_is_killed_at_many_random_instants_goes_on(
    tmp_path: Path, variant: str, least_kills: int
) -> None:
    rng = np.random.default_rng(sum(variant.encode()))
    with runs_of(variant, "train.steps=30") as runs:
        runs.finish(tmp_path / "whole")
        expected = outcome(tmp_path / "whole")
        if variant == "float16":
            assert expected.lines[-1]["skipped_steps"] > 3
        kills = 0
        for number in count():
            kills += killed_until_done(runs, tmp_path / f"killed{number}", expected, rng)
            if kills >= least_kills:
                break
    print(f"{variant}: {kills} kills in {number + 1} runs")


def killed_until_done(runs: Runs, folder: Path, expected: Outcome, rng: np.random.Generator) -> int:
    """Kills a run again and again until it has ended by itself, compares it, and returns how often it was killed."""
    kills, longest_life_s, most, since = 0, _LONGEST_LIFE_S, 0, 0
    # One in seven while it starts and reads its state, the others while it trains.
    while runs.kill_after(folder, float(rng.uniform(0, longest_life_s)), began=bool(rng.random() > 1 / 7)):
        kills += 1
        metrics = folder / "metrics.jsonl"
        steps = len(read_lines(metrics)) if metrics.exists() else 0
        most, since = (steps, 0) if steps > most else (most, since + 1)
        if since >= 6:
            # On a busy machine not even a step gets done, or none that is saved.
            longest_life_s, since = longest_life_s * 1.5, 0
    check_same(folder, expected)
    return kills


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_of_smollm2_that_is_killed_ten_times_goes_on(tmp_path: Path) -> None:
    try:
        smollm2_135m_path()
    except MemascendError as error:
        pytest.skip(f"the model cannot be had: {error}")
    rng = np.random.default_rng(1)
    settings = (
        "train.steps=8",
        "data.seq_len=128",
        "data.eval_sequences=2",
        "train.samples=0",
        "train.eval_every=3",
    )
    with Runs(*settings, config="smollm2_135m") as runs:
        runs.finish(tmp_path / "whole")
        expected = outcome(tmp_path / "whole")
        # So long a step took here, on whatever machine this is.
        step_s = expected.step_s
        shutil.rmtree(tmp_path / "whole")
        kills = number = 0
        while kills < 10:
            folder = tmp_path / f"killed{number}"
            # The first step of a process loads what is compiled.
            while kills < 10 and runs.kill_after(folder, float(rng.uniform(0, 4 * step_s))):
                kills += 1
            runs.finish(folder)
            check_same(folder, expected)
            shutil.rmtree(folder)
            number += 1
    print(f"SmolLM2: {kills} kills in {number} runs")
