# SPDX-License-Identifier: Apache-2.0
"""The loop devices of the tests themselves: a killed session leaves none behind, nor mounts, nor partitions."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import DEVICE_BYTES
from stores import loop_device

KILLED = """
import os, signal, subprocess, sys
from pathlib import Path
from places import DEVICE_BYTES, partition_of
from stores import loop_device, mounted
folder = Path(sys.argv[1])
with loop_device(folder / "cut", DEVICE_BYTES) as cut, loop_device(folder / "disk", 32 << 20) as disk:
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    with partition_of(cut) as part, mounted(disk, folder / "mounted"), open(part, "rb"):
        print(cut, disk, part, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_session_leaves_no_device_no_mount_and_no_partition(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n{KILLED}", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        pytest.skip(f"no devices here: {done.stderr.strip().splitlines()[-1]}")
    cut, disk, part = done.stdout.split()
    deadline = time.monotonic() + 10
    while any(backing_file(device).startswith(str(tmp_path)) for device in (cut, disk)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "mounted").is_mount()
    with loop_device(tmp_path / "next", DEVICE_BYTES) as device:
        # The kernel gives the lowest number that is free, so this is the device with the partition that was left.
        assert device != cut or not Path(part).exists()
        assert not list(Path("/sys/block", Path(device).name).glob("loop*p*"))


def backing_file(device: str) -> str:
    path = Path("/sys/block", Path(device).name, "loop/backing_file")
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
