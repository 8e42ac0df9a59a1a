# SPDX-License-Identifier: Apache-2.0
"""The comparison of whole runs: arguments, turns, and what becomes of a run that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend_jax.bench import training


def test_arguments_before_the_first_run_go_to_all() -> None:
    rounds, folder, contenders = training.parse(
        ["--rounds", "3", "train.steps=2", "--folder", "/x", "--run", "a", "k=1", "--run", "b"]
    )
    assert (rounds, folder) == (3, Path("/x"))
    assert [(c.name, c.arguments) for c in contenders] == [
        ("a", ["train.steps=2", "k=1"]),
        ("b", ["train.steps=2"]),
    ]


@pytest.mark.parametrize("words", [[], ["train.steps=2"], ["--run"], ["--rounds"]])
def test_a_command_line_without_runs_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse(words)


def test_two_placements_are_compared_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--config", "tiny_random", "train.steps=3"]
    runs = ["--run", "memory", "offload.placement=memory", "--run", "ssd", "offload.placement=ssd"]
    broken = ["--run", "broken", "offload.host_memory=1MiB"]
    assert training.main(["--folder", str(tmp_path), *common, *runs, *broken]) == 1
    lines = capsys.readouterr().out.splitlines()
    memory, ssd, refused = (json.loads(line) for line in lines[-3:])
    assert memory["ssd_write_bytes_per_step"] == 0 < ssd["ssd_write_bytes_per_step"]
    assert memory["loss_last"] == ssd["loss_last"]
    assert ssd["steps"] == 2
    assert ssd["ratio"] > 0
    assert "1 MiB" in refused["error"] or "exit status 4" in refused["error"]
    assert list(tmp_path.iterdir()) == []
