# SPDX-License-Identifier: Apache-2.0
"""A disk that vanishes under a running command: one message with the path, the storage status, and no hang."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stores import loop_device, mounted

from memascend_jax.observe.metrics import read_lines

pytestmark = [pytest.mark.fault, pytest.mark.integration, pytest.mark.timeout(200)]

#: EXT4_IOC_SHUTDOWN of linux/ext4.h, and its flag that writes nothing more, not even the journal.
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_DISK_BYTES = 160 << 20
#: From the loss to the end of the process.
_LONGEST_S = 30.0


@contextlib.contextmanager
def disk_that_can_vanish(folder: Path) -> Iterator[Path]:
    """Yields a folder on an ext4 of its own, whose every access is an EIO after ``vanish``."""
    with loop_device(folder / "image", _DISK_BYTES) as device:
        done = subprocess.run(["mkfs.ext4", "-q", device], check=False)
        if done.returncode != 0:
            pytest.skip("no mkfs.ext4")
        with mounted(device, folder / "disk") as place:
            yield place


def vanish(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    except OSError as error:
        pytest.skip(f"this kernel's ext4 cannot be shut down: {error}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def member(place: Path, kind: str) -> Iterator[str]:
    """Yields the path of a store's member on ``place``: a file there, or a block device whose bytes are there."""
    if kind == "file":
        yield str(place / "member")
        return
    with loop_device(place / "backing", _DISK_BYTES // 2) as device:
        # Blocks that the device has only when they are written would need the journal.
        os.truncate(place / "backing", 0)
        subprocess.run(["fallocate", "-l", str(_DISK_BYTES // 2), str(place / "backing")], check=True)
        yield device


@contextlib.contextmanager
def training(folder: Path, store: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Yields the command some steps into a run without end."""
    command = [
        *(sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"),
        *(f"run.dir={folder}", f"offload.store=[{store}]", "train.steps=1000000", *overrides),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            metrics = folder / "metrics.jsonl"
            while not metrics.exists() or len(read_lines(metrics)) < 3:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def check_end(process: subprocess.Popen[str], path: str, folder: Path, began: float) -> str:
    """Returns what the process said, which ended as a failure of the disk ``path`` should."""
    _, said = process.communicate(timeout=_LONGEST_S)
    assert time.monotonic() - began < _LONGEST_S
    assert process.returncode == 6, said
    assert "Traceback" not in said
    message = said.strip().splitlines()[-1]
    assert message.startswith("memascend: ")
    assert f"'{path}'" in message
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert path in status["message"]
    return message


def keep_cut(process: subprocess.Popen[str], path: Path) -> None:
    """Cuts the file for as long as the process lives."""
    deadline = time.monotonic() + _LONGEST_S
    while process.poll() is None and time.monotonic() < deadline:
        os.truncate(path, 1 << 16)
        time.sleep(0.001)


EXACT = ["offload.update=exact"]
IN_BACKWARD = ["offload.update=in_backward", "optimizer.clip_norm=null"]


@pytest.mark.parametrize(
    ("kind", "backend", "mode"),
    [
        ("file", "io_uring", EXACT),
        ("device", "io_uring", IN_BACKWARD),
        ("file", "threads", IN_BACKWARD),
        ("device", "threads", EXACT),
    ],
)
def test_a_disk_that_vanishes_ends_the_run_with_its_path(
    tmp_path: Path, kind: str, backend: str, mode: list[str]
) -> None:
    folder = tmp_path / "run"
    with disk_that_can_vanish(tmp_path) as place, member(place, kind) as path:
        with training(folder, path, f"offload.io_backend={backend}", *mode) as process:
            vanish(place)
            message = check_end(process, path, folder, time.monotonic())
        assert "[EIO]" in message


def test_a_member_that_is_cut_short_is_named(tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "member"
    with (
        training(folder, str(path), "offload.direct_io=optional") as process,
        ThreadPoolExecutor(1) as cutting,
    ):
        # A write behind the end makes the file long again, with a hole that reads as zeros: only verify sees it.
        cutting.submit(keep_cut, process, path)
        message = check_end(process, str(path), folder, time.monotonic())
    assert "ends" in message or "short" in message
