# SPDX-License-Identifier: Apache-2.0
"""What a run goes on with where its store is gone: its own checkpoints, wherever its folder is now, and no other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_steps import save_small

from memascend_jax.config import Config, load_config
from memascend_jax.errors import ConfigError
from memascend_jax.recipes.origin import find_origin
from memascend_jax.recipes.run_folder import RunFolder

OURS, OTHERS = "a" * 32, "b" * 32


def config_in(folder: Path, *settings: str) -> Config:
    return load_config(["tiny_random"], [f"run.dir={folder}", *settings])


def killed_run(folder: Path, *steps: int, run_id: str = OURS, checkpoints: Path | None = None) -> None:
    """What a run leaves whose store is lost: its status and checkpoints."""
    mine = RunFolder(config_in(folder))
    mine.path.mkdir(exist_ok=True)
    mine.run_id, mine.store_id = run_id, "c" * 32
    mine.write_status("running", max(steps), 12)
    for step in steps:
        state = {"step": step, "schema": 1, "config": {"run": {"dir": str(folder)}}, "tile_elements": 1}
        save_small(checkpoints or folder / "checkpoints", step, run_state={**state, "run_id": run_id})


def test_a_moved_folder_goes_on_from_its_checkpoints_and_another_runs_are_refused(tmp_path: Path) -> None:
    killed_run(tmp_path / "a", 2)
    (tmp_path / "a").rename(tmp_path / "moved")
    origin = find_origin(config_in(tmp_path / "moved"))
    assert origin.own and origin.saved is not None and origin.state().run_id == OURS
    # Its checkpoints under another run's files, and in the place of one that knows nothing of them.
    killed_run(tmp_path / "b", 4, run_id=OTHERS, checkpoints=tmp_path / "elsewhere")
    shared = f"checkpoint.dir={tmp_path / 'moved' / 'checkpoints'}"
    for folder in (tmp_path / "b", tmp_path / "new"):
        with pytest.raises(ConfigError, match="holds the checkpoints of another run than"):
            find_origin(config_in(folder, shared))
    # Checkpoints that lie elsewhere know the moved folder too.
    (tmp_path / "b").rename(tmp_path / "b2")
    assert find_origin(config_in(tmp_path / "b2", f"checkpoint.dir={tmp_path / 'elsewhere'}")).own


def test_checkpoints_without_an_id_are_known_by_their_store_or_their_place(tmp_path: Path) -> None:
    killed_run(tmp_path / "a", 2, run_id="")
    path = tmp_path / "a" / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": None}))
    assert find_origin(config_in(tmp_path / "a")).own
    (tmp_path / "a").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="of another run"):
        find_origin(config_in(tmp_path / "moved"))
