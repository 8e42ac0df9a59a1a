# SPDX-License-Identifier: Apache-2.0
"""What a run goes on with where its store is gone: its own checkpoints, wherever its folder is now, and no other's."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from saved_steps import save_small

from memascend_jax import cli
from memascend_jax.config import Config, load_config
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.recipes.export_source import open_source
from memascend_jax.recipes.origin import find_origin, with_way_back
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.recipes.run_store import check_whole
from memascend_jax.storage.store_errors import DamagedStoreError
from memascend_jax.storage.tensor_store import TensorStore

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


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def a_chunk(step: Path) -> Path:
    return step / "state" / "mu.model.layers.0.mlp.up_proj.weight" / "c" / "0" / "0"


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_both(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed_run(folder, 2, 4)
    flip(a_chunk(folder / "checkpoints" / "4"), 100)
    origin = find_origin(config_in(folder))
    assert origin.saved is not None and origin.saved.record.step == 2
    (warning,) = [note for note in origin.notes if note.startswith("warning: ")]
    assert "of step 4 is damaged, so that of step 2 is used instead" in warning and "CRC32C" in warning
    flip(a_chunk(folder / "checkpoints" / "2"), 100)
    with pytest.raises(DataError, match="none is whole"):
        find_origin(config_in(folder))


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_of_a_damaged_store_the_checkpoint_and_the_way_to_it_are_told(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    config = config_in(folder, "offload.direct_io=optional")
    folder.mkdir()
    path = folder / "memascend.store"
    with TensorStore.create(path, capacity="1MiB", direct_io="optional") as store:
        store.put("w", np.ones(50_000, np.float32))
        store.commit(b"{}")
    content = path.read_bytes()
    ones = content.find(np.ones(1000, np.float32).tobytes())
    flip(path, ones) if how == "flipped" else path.write_bytes(content[: len(content) // 2])

    def told() -> str:
        with pytest.raises(DamagedStoreError) as raised:
            if how == "cut":
                find_origin(config)
            try:
                check_whole(config)
            except DamagedStoreError as error:
                raise with_way_back(error, config) from error
        return str(raised.value)

    before = path.read_bytes()
    assert "There is no checkpoint to go on from" in told()
    killed_run(folder, 8)
    message = told()
    assert (
        "The checkpoint of step 8 in" in message
        and f"memascend store wipe {path}) the same command" in message
    )
    assert path.read_bytes() == before
    # The command that is named does remove it.
    assert cli.main(["store", "wipe", str(path)]) == 0
    assert find_origin(config).own


def test_a_step_of_a_run_is_exported_by_its_folder_and_one_that_is_not_there_names_those_that_are(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    killed_run(folder, 2, 4)
    (folder / "config.yaml").write_text(f"run: {{dir: {folder}}}\n")
    (folder / "memascend.store").write_bytes(b"x")
    with ExitStack() as stack:
        assert open_source([str(folder)], 2, stack).facts["step"] == 2
        with pytest.raises(DataError, match="has no step 7; the steps there are: 2, 4"):
            open_source([str(folder)], 7, stack)
        shutil.rmtree(folder / "checkpoints")
        with pytest.raises(DataError, match=r"cannot export a step of the run in .* has no checkpoints"):
            open_source([str(folder)], 7, stack)


def test_an_empty_name_of_a_key_is_told() -> None:
    for text in ("run.allow_changed=['']", "run.allow_changed=''"):
        with pytest.raises(ConfigError, match="got an empty name"):
            load_config(["tiny_random"], [text])
