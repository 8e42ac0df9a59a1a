# SPDX-License-Identifier: Apache-2.0
"""What keeps a new run from starting is found before its folder is touched, and says what the user can change."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from places import DEVICE_BYTES, BlockDevices
from stores import ANY_DISK, abandon, loop_device, mounted, write

from memascend_jax import cli
from memascend_jax.config import Config, load_config, to_dict
from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.observe.failure import exit_status
from memascend_jax.observe.report import read_run
from memascend_jax.recipes import llama_finetune
from memascend_jax.recipes.planning import disk_free_bytes, plan_from_config
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.recipes.run_store import durability_note
from memascend_jax.recipes.store_place import check_places
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore, bytes_needed
from memascend_jax.training.run_state import RunState
from memascend_jax.units import format_bytes


def tiny(tmp_path: Path, *overrides: str) -> Config:
    return load_config(["tiny_random"], [f"run.dir={tmp_path / 'run'}", *overrides])


def refuse(tmp_path: Path, *overrides: str) -> int:
    """Returns the status of a run that must leave no trace."""
    before = sorted(path.name for path in tmp_path.iterdir())
    status = llama_finetune.main(["--config", "tiny_random", f"run.dir={tmp_path / 'run'}", *overrides])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return status


def test_foreign_file_is_named_with_what_the_user_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"precious" * 100)
    assert refuse(tmp_path, f"offload.store=[{mine}]", "offload.direct_io=optional") == 6
    said = capsys.readouterr()
    assert "it holds data of an unknown kind; choose another offload.store" in said.err
    assert "erase" not in said.err
    assert said.err.count("\n") == 1, "nothing is shown before"
    assert mine.read_bytes() == b"precious" * 100


def test_foreign_device_is_named_with_a_command_that_helps(
    tmp_path: Path, block_devices: BlockDevices
) -> None:
    device = block_devices.blank("device")
    with open(device, "r+b") as raw:
        raw.write(b"precious")
    config = tiny(tmp_path, f"offload.store=[{device}]")
    command = f"memascend store create {device} --erase-foreign-data {device}"
    with pytest.raises(StoreError, match=command):
        check_places(config)
    TensorStore.create(device, erase_foreign_data=[device]).close()
    check_places(config)


def test_store_in_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        TensorStore.create(path, capacity="1MiB", direct_io="optional"),
        pytest.raises(StoreError, match="in use"),
    ):
        check_places(tiny(tmp_path, f"offload.store=[{path}]", "offload.direct_io=optional"))


def test_memory_instead_of_a_disk_is_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted("tmpfs", tmp_path / "ram", "-t", "tmpfs", "-o", "size=1m") as folder:
        assert refuse(tmp_path, f"offload.store=[{folder}]") == 6
        said = capsys.readouterr().err
        assert "is on tmpfs, which is memory, not a disk" in said
        assert "offload.direct_io=optional" in said
        # Allowed, and then too small: that too is found before anything is written.
        assert refuse(tmp_path, f"offload.store=[{folder}]", "offload.direct_io=optional") == 4
        assert "are free there" in capsys.readouterr().err
        assert list(folder.iterdir()) == []


def test_disk_without_direct_io_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def open_without_direct(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return really_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.raises(StoreError, match=r"cannot bypass the page cache .*offload\.direct_io=optional"):
        check_places(tiny(tmp_path))
    check_places(tiny(tmp_path, "offload.direct_io=optional"))
    assert list(tmp_path.iterdir()) == []


def test_room_for_a_store_is_what_its_fullest_disk_has_for_each_member(
    tmp_path: Path, block_devices: BlockDevices
) -> None:
    def free() -> int:
        disk = os.statvfs(tmp_path)
        return disk.f_bavail * disk.f_frsize

    one, two, device = tmp_path / "a", tmp_path / "not" / "yet" / "b", Path(block_devices.blank("device"))
    assert disk_free_bytes([one]) == pytest.approx(free(), abs=64 << 20)
    # Two members on one disk share what it has.
    assert disk_free_bytes([one, two]) == pytest.approx(free(), abs=64 << 20)
    assert disk_free_bytes([device]) == DEVICE_BYTES
    assert disk_free_bytes([one, device]) == 2 * min(DEVICE_BYTES, free())
    with TensorStore.create(tmp_path, capacity="256MiB", direct_io="optional"):
        # A resumed run needs no room but its own; the folder stands for the file in it.
        assert disk_free_bytes([tmp_path]) == pytest.approx(free() + (256 << 20), abs=64 << 20)
    assert disk_free_bytes([Path("/proc/self/s")]) is None


def test_run_folder_that_cannot_be_written_is_a_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    below = RunFolder(load_config([], [f"run.dir={tmp_path / 'file' / 'run'}"]))
    with pytest.raises(ConfigError, match=r"cannot write to run\.dir=.*/file' is not a folder"):
        below.check_writable()
    folder = RunFolder(tiny(tmp_path))
    folder.check_writable()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="is read-only, or not yours to write; choose a folder"):
        folder.check_writable()
    impossible = load_config([], ["run.dir=/proc/nowhere/run"])
    with pytest.raises(ConfigError, match=r"cannot write to run\.dir='/proc/nowhere/run'"):
        RunFolder(impossible).prepare(impossible, {}, 0, 1)


def test_run_that_was_killed_at_its_very_beginning_does_not_block_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    folder = RunFolder(config)
    written: list[str] = []
    monkeypatch.setattr(folder.__class__, "_write", lambda self, name, text: written.append(name))
    folder.prepare(config, {}, 0, 6)
    monkeypatch.undo()
    for count in range(len(written) + 1):
        for name in written[:count]:
            (tmp_path / "run" / name).write_text("x")
        folder.check_is_free()
    assert set(written) == {"status.json", "config.yaml", "plan.json"}


def test_export_of_something_else_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "export").mkdir(parents=True)
    assert refuse(tmp_path, "offload.direct_io=optional") == 2
    assert "it holds export of something else" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["export"]


def test_store_of_two_steps_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    state = RunState(4, to_dict(tiny(tmp_path)), 1 << 10)
    store = TensorStore.create(
        path,
        specs=[TensorSpec("w", "float32", (2048,), tile_elements=1 << 10)],
        durability="checkpoint",
        **ANY_DISK,
    )
    values = np.arange(2048, dtype=np.float32)
    store.write_elements("w", 0, values)
    store.commit(state.encode())
    # The very bytes that are there: no checksum tells.
    write(store, "w", 0, values[:1024])
    abandon(store)

    assert refuse(tmp_path, f"offload.store=[{path}]", "offload.direct_io=optional") == 6
    told = capsys.readouterr()
    assert "mixture of two steps" in told.err
    assert f"memascend store wipe {path}" in told.err
    assert "offload.durability=step" in told.err
    assert "going on" not in told.err
    assert cli.main(["store", "verify", str(path)]) == 6
    told = capsys.readouterr()
    assert "overwritten in place" in told.out
    assert "every checksum matches" not in told.out
    assert "mixture of two steps" in told.err
    assert cli.main(["export", str(path), "--out", str(tmp_path / "out")]) == 6
    assert "mixture of two steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "got", "every", "told"),
    [
        ("plan", "checkpoint", 0, "a crash or power cut loses this run. offload.durability=step would"),
        ("plan", "checkpoint", 5, "a crash or power cut goes back to the last checkpoint, at most 5 steps. "),
        ("plan", "step", 0, None),
        ("checkpoint", "checkpoint", 0, "checkpoint.every: a crash or power cut loses this run"),
        ("checkpoint", "checkpoint", 5, None),
    ],
)
def test_durability_that_the_small_disk_chose_is_told_with_the_room_for_the_better_one(
    tmp_path: Path, asked: str, got: Durability, every: int, told: str | None
) -> None:
    config = tiny(tmp_path, f"offload.durability={asked}", f"checkpoint.every={every}")
    plan = plan_from_config(config)
    step, checkpoint = (bytes_needed(plan.specs, plan.scratch_bytes, kind) for kind in ("step", "checkpoint"))
    with TensorStore.create(tmp_path / "s", capacity="1MiB", durability=got, **ANY_DISK) as store:
        note = durability_note(config, plan, store)
    assert (note is None) == (told is None)
    if note is not None:
        assert told is not None and told in note
    if note is not None and asked == "plan":
        assert f"takes {format_bytes(step)}, {format_bytes(step - checkpoint)} more" in note


def test_full_disk_ends_a_run_with_its_numbers_and_the_status_that_it_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path) as disk:
        config = load_config(["tiny_random"], [f"run.dir={disk / 'run'}"])
        folder = RunFolder(config)
        folder.prepare(config, {}, 0, 6)
        folder.write_status("running", 3, 6)
        names = sorted(path.name for path in folder.path.iterdir())
        fill(disk)

        def run() -> int:
            try:
                folder.write_summary({"figures": "x" * 5000})
            except OSError as error:
                folder.write_last_status("failed", 3, 6, str(error))
                raise
            return 0

        assert exit_status(run, resumable=True) == 6
        told = capsys.readouterr().err
        path = re.escape(str(folder.path / "summary.json"))
        assert re.search(rf"'{path}' \([\d,]+ bytes are free there\)", told)
        assert "No space left on device" in told
        assert "free space, then give the same command again: a run on SSD goes on" in told
        assert sorted(path.name for path in folder.path.iterdir()) == names
        status = read_run(folder.path)["status"]
        assert (status["state"], status["step"]) == ("failed", 3)
        with pytest.raises(OSError, match="No space left"):
            folder.prepare(config, {"more": "x" * 5000}, 3, 6)


def test_status_that_cannot_be_written_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    folder = RunFolder(config)
    folder.prepare(config, {}, 0, 6)
    before = (folder.path / "status.json").read_bytes()

    def refuse_to_open(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.open", refuse_to_open)
    monkeypatch.setattr(Path, "write_text", refuse_to_open)
    folder.write_last_status("failed", 3, 6, "why")
    monkeypatch.undo()
    assert (folder.path / "status.json").read_bytes() == before


@contextmanager
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder on an ext4 of 4 MiB."""
    with loop_device(tmp_path / "image", 4 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", device], check=True)
        with mounted(device, tmp_path / "disk") as folder:
            yield folder


def fill(disk: Path) -> None:
    """Leaves no free byte on ``disk``."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
        os.fsync(file.fileno())


@pytest.mark.parametrize("direct_io", ["required", "optional"])
def test_file_system_without_data_is_refused(
    tmp_path: Path, direct_io: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(tmp_path, "offload.store=[/proc]", f"offload.direct_io={direct_io}") == 6
    assert "'/proc' is not on a disk" in capsys.readouterr().err


def test_store_and_folder_of_two_runs_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other, home = tmp_path / "s", tmp_path / "other", tmp_path / "home"
    config = tiny(tmp_path, f"run.dir={home}", "train.steps=6", "train.seed=3")

    def commit(store: TensorStore, **results: object) -> None:
        state = RunState(6, to_dict(config), 1 << 10).with_results(**results)
        store.put("w", np.zeros(1, np.float32))
        store.commit(state.encode())

    with TensorStore.create(path, capacity="1MiB", **ANY_DISK) as store:
        commit(store, finished=True)
        store_id = store.store_id
    for name, owner in (("home", store_id), ("other", "f" * 32)):
        folder = RunFolder(tiny(tmp_path, f"run.dir={tmp_path / name}"))
        folder.store_id = owner
        folder.prepare(config, {}, 6, 6)
        folder.write_summary({"step": 6, "eval_loss_after": 4.5 if owner == store_id else 9.875})

    command = (f"offload.store=[{path}]", "offload.direct_io=optional", "train.steps=6", "train.seed=3")
    assert refuse(tmp_path, *command) == 2
    told = capsys.readouterr()
    assert f"it began with run.dir={str(home)!r}" in told.err
    assert "memascend export" in told.err
    assert refuse(tmp_path, *command, f"run.dir={other}") == 2
    told = capsys.readouterr()
    assert "files of another run" in told.err
    assert f"run.dir={str(home)!r}" in told.err
    assert "9.875" not in told.out
    # Its own folder, also under another name, is shown.
    home.rename(tmp_path / "moved")
    assert refuse(tmp_path, *command, f"run.dir={tmp_path / 'moved'}") == 0
    assert "complete at step 6" in capsys.readouterr().err
    # A run that is not complete may go on in a new folder, but not over the files of something else.
    folder = RunFolder(tiny(tmp_path))
    folder.check_is_of(store_id, str(home), finished=False)
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl of something else"):
        folder.check_is_of(store_id, str(home), finished=False)
