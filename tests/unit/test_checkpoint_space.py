# SPDX-License-Identifier: Apache-2.0
"""What checkpoints take is known before a run begins, and refused with the numbers; a full disk costs one, not all."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_steps import save_small

from memascend_jax import cli
from memascend_jax.config import Config, load_config
from memascend_jax.errors import BudgetError, ConfigError
from memascend_jax.recipes import checkpointing, planning
from memascend_jax.recipes.checkpoint_space import (
    LIBRARY_BYTES,
    CheckpointSpace,
    check_checkpoint_folder,
    check_checkpoint_space,
    checkpoint_folder,
    checkpoint_space,
    prove_writable,
)
from memascend_jax.recipes.planning import plan_config, plan_from_config
from memascend_jax.training.run_state import RunState
from memascend_jax.units import format_bytes

#: bf16 parameters with fp32 masters and moments.
BYTES_PER_PARAMETER = 14


def tiny(folder: Path, *more: str) -> Config:
    return load_config(["tiny_random"], [f"run.dir={folder}", "checkpoint.every=2", *more])


def test_a_step_takes_the_bytes_of_its_state_and_little_more(tmp_path: Path) -> None:
    config = tiny(tmp_path, "checkpoint.keep=3", "checkpoint.keep_best=1", "train.eval_every=1")
    plan = plan_from_config(config)
    space = checkpoint_space(config, plan.layout.format, plan.layout.tensors)
    assert space is not None
    state = BYTES_PER_PARAMETER * plan.layout.n_parameters
    assert state < space.step_bytes < 1.01 * state
    assert (space.kept, space.total_bytes) == (4, 5 * space.step_bytes)
    assert space.missing_bytes == space.total_bytes
    assert space.folder == tmp_path / "checkpoints" and space.on_store_disk


def test_no_room_is_told_with_every_number(tmp_path: Path) -> None:
    space = CheckpointSpace(tmp_path, 5, 1 << 50, 2, 1, True)
    with pytest.raises(BudgetError) as raised:
        check_checkpoint_space(space, 3 << 40)
    told = str(raised.value)
    for part in (format_bytes(2 << 50), f"3 steps of {format_bytes(1 << 50)}", "1 are there", str(tmp_path)):
        assert part in told
    assert f"besides the {format_bytes(3 << 40)} of the store" in told
    assert "checkpoint.keep" in told and "checkpoint.dir" in told and " are missing. " in told
    check_checkpoint_space(CheckpointSpace(tmp_path, 5, 4096, 2, 0, True), 0)


def test_the_store_leaves_room_for_the_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"for its checkpoints, but only .* are free there.*checkpoint\.keep"
    ):
        plan_from_config(tiny(tmp_path, "checkpoint.keep=1000000000"))

    assert not tmp_path.joinpath("checkpoints").exists()


def test_of_a_store_that_is_there_no_room_is_asked_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    made = plan_from_config(config)
    monkeypatch.setattr(planning, "disk_free_bytes", lambda paths: 1000)
    with pytest.raises(BudgetError, match="of disk space for its store"):
        plan_config(config, made.layout.config, n_examples=2)
    step = config.model_copy(update={"offload": config.offload.model_copy(update={"durability": "step"})})
    again = plan_config(step, made.layout.config, n_examples=2, tile_elements=made.depths.tile_elements)
    assert again.durability == "step"


def test_the_plan_counts_memory_space_time_and_wear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--config", "tiny_random", f"run.dir={tmp_path}", "--json"]
    speeds = ["--read-bandwidth", "1GB/s", "--write-bandwidth", "2GB/s"]
    assert cli.main([*command, *speeds]) == 0
    without = json.loads(capsys.readouterr().out)
    assert cli.main([*command, *speeds, "checkpoint.every=4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert without["checkpoints"] is None
    saved = facts["checkpoints"]
    assert saved["disk_bytes"] == 3 * saved["step_bytes"]
    assert saved["seconds"] == pytest.approx(saved["step_bytes"] * (1 / 1e9 + 1 / 2e9))
    more = facts["terabytes_written_per_1000_steps"] - without["terabytes_written_per_1000_steps"]
    assert more == pytest.approx(250 * saved["step_bytes"] / 1e12, abs=2e-6)
    assert facts["planned_host_bytes"] - without["planned_host_bytes"] == LIBRARY_BYTES
    assert cli.main([*command[:-1], "checkpoint.every=4"]) == 0
    assert "every 4 steps" in capsys.readouterr().out


def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", f"checkpoint.dir={tmp_path / 'there'}")
    assert checkpoint_folder(config) == tmp_path / "there"
    check_checkpoint_folder(config)
    prove_writable(config)
    assert list((tmp_path / "there").iterdir()) == []
    save_small(tmp_path / "there", 2)
    (tmp_path / "there" / "lost+found").mkdir()
    (tmp_path / "there" / "4.orbax-checkpoint-tmp").mkdir()
    check_checkpoint_folder(config)
    (tmp_path / "there" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds 'thesis.tex', which is not a step"):
        check_checkpoint_folder(config)
    (tmp_path / "there" / "thesis.tex").unlink()
    (tmp_path / "there" / "2" / "run").rename(tmp_path / "there" / "2" / "other")
    with pytest.raises(ConfigError, match="were not saved by this program"):
        check_checkpoint_folder(config)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder"):
        check_checkpoint_folder(tiny(tmp_path / "run", f"checkpoint.dir={tmp_path / 'file'}"))


class FullDisk:
    """Steps on a disk that is full."""

    steps = (2,)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settle(self) -> None:
        pass

    def save(self, record: Any, state: Any, metrics: Any) -> list[int]:
        raise OSError(errno.ENOSPC, "cannot write the checkpoint: No space left on device", str(self.folder))


def test_a_full_disk_costs_the_checkpoint_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    plan = plan_from_config(tiny(tmp_path))
    placement = SimpleNamespace(finish_commit=lambda: None)
    saver: Any = FullDisk(tmp_path)
    checkpoints = checkpointing.RunCheckpoints(
        saver,
        plan.layout,
        placement,
        dict,
        None,
        said.append,  # type: ignore[arg-type]
    )
    checkpoints.save(RunState(4, {}, 1), None)
    (told,) = said
    assert "checkpoint of step 4 could not be saved" in told and "No space left on device" in told
    assert "the run goes on, with the steps saved before (2)" in told
