# SPDX-License-Identifier: Apache-2.0
"""Faults of disks, files and other processes under the main job: a named error or a recovery, nothing wrong written.

After every fault the same command, once its cause is gone, ends as an undisturbed run does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_runs import Outcome, Runs, check_same, exact_lines, outcome
from stores import loop_device, mounted

from memascend_jax.storage.tensor_store import TensorStore

pytestmark = [pytest.mark.fault, pytest.mark.integration]

STEPS = 6


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs(f"train.steps={STEPS}") as runs:
        yield runs


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.finish(folder)
    return outcome(folder)


def stop_at(runs: Runs, folder: Path, step: int, *overrides: str) -> None:
    """Leaves a run that a signal stopped at ``step`` or soon after."""
    runs.start(folder, *overrides)
    runs.wait_for_step(folder, step)
    runs.signal(signal.SIGTERM)
    assert runs.wait() == 75


def contents(folder: Path) -> dict[str, bytes]:
    """What must not change when a run is refused."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def fill(folder: Path) -> Path:
    """Takes all that the disk of ``folder`` has left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for nbytes in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(nbytes)) == nbytes:
                    pass
            except OSError:
                continue
    return filler


@pytest.mark.parametrize("operation", ["write", "flush", "read"])
def test_a_store_that_fails_ends_the_run_and_the_last_step_goes_on(
    runs: Runs, undisturbed: Outcome, tmp_path: Path, operation: str
) -> None:
    folder = tmp_path / "run"
    # In the middle of a step that has others before it.
    number = {"write": 200, "flush": 10, "read": 60}[operation]
    status, message = runs.fail(folder, end=(operation, number, "EIO"))
    assert status == 6, message
    assert str(folder / "memascend.store") in message
    assert "Input/output error [" in message
    told = json.loads((folder / "status.json").read_text())
    assert (told["state"], told["step"] > 0) == ("failed", True)
    runs.finish(folder)
    check_same(folder, undisturbed)


def test_a_run_folder_on_a_full_disk_is_named_and_a_full_disk_does_not_touch_the_store(
    runs: Runs, undisturbed: Outcome, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path / "small", "-t", "tmpfs", "-o", "size=4m") as disk:
        folder, store = disk / "run", tmp_path / "store"
        where = f"offload.store=[{store}]"
        runs.start(folder, where)
        runs.wait_for_step(folder, 2)
        began = time.monotonic()
        filler = fill(disk)
        status, message = runs.failed(folder, began)
        assert status == 6
        assert "No space left on device" in message
        assert str(folder) in message
        assert "free space, then give the same command again" in message
        filler.unlink()
        runs.finish(folder, where, "run.export=false")
        lines = exact_lines(folder)
        assert lines == undisturbed.lines


def test_a_full_disk_under_the_store_is_no_matter(runs: Runs, undisturbed: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with loop_device(tmp_path / "image", 48 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(device, tmp_path / "disk") as disk:
            where = f"offload.store=[{disk / 'store'}]"
            stop_at(runs, folder, 2, where)
            fill(disk)
            runs.finish(folder, where)
            shutil.copy(disk / "store", folder / "memascend.store")
    check_same(folder, undisturbed)


def test_a_disk_that_became_read_only_is_named_and_nothing_is_lost(
    runs: Runs, undisturbed: Outcome, tmp_path: Path
) -> None:
    with loop_device(tmp_path / "image", 48 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(device, tmp_path / "disk") as disk:
            folder, store = tmp_path / "run", disk / "store"
            for place, where in (
                (store, (folder, f"offload.store=[{store}]")),
                (disk / "run", (disk / "run", f"offload.store=[{tmp_path / 'elsewhere'}]")),
            ):
                stop_at(runs, where[0], 2, where[1])
                metrics = (where[0] / "metrics.jsonl").read_bytes()
                remount(disk, "ro")
                status, message = runs.fail(*where)
                assert status in (2, 6), message
                assert "read-only" in message.lower()
                assert str(place) in message
                assert (where[0] / "metrics.jsonl").read_bytes() == metrics
                remount(disk, "rw")
                runs.finish(*where, "run.export=false")
                assert exact_lines(where[0]) == undisturbed.lines


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_second_run_on_the_same_store_or_folder_is_refused_and_the_first_goes_on(
    runs: Runs, undisturbed: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Runs(f"train.steps={STEPS}") as others:
        runs.start(folder)
        runs.wait_for_step(folder, 1)
        runs.signal(signal.SIGSTOP)
        try:
            process = json.loads((folder / "status.json").read_text())["pid"]
            other = tmp_path / "other"
            for settings, words in (
                ((folder,), f"in use by process {process}"),
                ((other, f"offload.store=[{folder / 'memascend.store'}]"), f"in use by process {process}"),
                ((folder, f"offload.store=[{tmp_path / 'new'}]"), "its store is not at"),
            ):
                status, message = others.fail(*settings)
                assert status in (2, 6), message
                assert words in message
            assert not other.exists()
            assert not (tmp_path / "new").exists()
        finally:
            runs.signal(signal.SIGCONT)
        assert runs.wait() == 0
    check_same(folder, undisturbed)


def test_of_two_runs_that_begin_together_one_is_refused(
    runs: Runs, undisturbed: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Runs(f"train.steps={STEPS}") as others:
        # It has found the folder free and there is no store yet.
        process = runs.start(folder, end=("file", 1, "pause"))
        wait_until_stopped(process)
        try:
            status, message = others.fail(folder)
            assert (status, f"run.dir='{folder}' is in use by another run" in message) == (2, True), message
            assert list(folder.iterdir()) == []
        finally:
            runs.signal(signal.SIGCONT)
        assert runs.wait() == 0
    check_same(folder, undisturbed)


def wait_until_stopped(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("moment", ["stopped", "killed"])
def test_a_flipped_bit_in_a_live_tile_is_found_before_a_step(runs: Runs, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    if moment == "stopped":
        stop_at(runs, folder, 2)
    else:
        assert runs.kill_at(folder, ("line", 3, "before"))
    path = folder / "memascend.store"
    name = "model.layers.1.mlp.up_proj.weight#mu"
    with TensorStore.open([path], read_only=True, direct_io="optional") as store:
        tensor = store._table.tensors[name]
        _, offset = store._volume.locate(tensor.bases[int(tensor.place[0])])
    flip(path, offset + 100)
    before, metrics = path.read_bytes(), (folder / "metrics.jsonl").read_bytes()
    status, message = runs.fail(folder)
    assert status == 6
    assert f"tensor '{name}' at '{path}' offset {offset:,}: checksum" in message
    assert f"memascend store wipe {path}" in message
    assert path.read_bytes() == before
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_files_that_are_cut_gone_or_damaged_are_named_or_made_again(
    runs: Runs, undisturbed: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stop_at(runs, folder, 2)
    store = folder / "memascend.store"

    # The store is shorter than it was, then gone; each time everything else is left alone.
    whole, kept = store.read_bytes(), tmp_path / "kept"
    os.truncate(store, len(whole) // 2)
    before = contents(folder)
    status, message = runs.fail(folder)
    assert (status, "was truncated" in message, str(store) in message) == (6, True, True)
    assert contents(folder) == before
    store.write_bytes(whole)
    store.rename(kept)
    before = contents(folder)
    status, message = runs.fail(folder)
    assert status == 2
    assert f"but its store is not at {store}; nothing was changed" in message
    assert contents(folder) == before

    # In another place it is the same store.
    for damaged, content in (("status.json", b"{"), ("config.yaml", b"\xff\x00"), ("plan.json", b"")):
        (folder / damaged).write_bytes(content)
    where = f"offload.store=[{kept}]"
    stop_at(runs, folder, 4, where)
    for gone in ("status.json", "config.yaml", "plan.json", "meter.jsonl"):
        (folder / gone).unlink()
    runs.finish(folder, where)
    shutil.copy(kept, store)
    check_same(folder, undisturbed)


@pytest.mark.parametrize("left", [0, 0.4])
def test_metrics_that_are_cut_lose_lines_and_nothing_else(
    runs: Runs, undisturbed: Outcome, tmp_path: Path, left: float
) -> None:
    folder = tmp_path / "run"
    stop_at(runs, folder, 3)
    metrics = folder / "metrics.jsonl"
    os.truncate(metrics, int(metrics.stat().st_size * left))
    runs.finish(folder)
    lines = exact_lines(folder)
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert lines == [line for line in undisturbed.lines if line["step"] in steps]
    assert "earlier lines are missing" in runs.log(folder).read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval_loss_after"] == undisturbed.summary["eval_loss_after"]
