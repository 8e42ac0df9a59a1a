# SPDX-License-Identifier: Apache-2.0
"""Where stores of tests live: files, whole block devices, partitions, and mixtures of them.

The block devices are loop devices with direct I/O, made once per session and blanked before each use. They need
root; without it the tests that use them are skipped with the reason.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from stores import loop_device

DEVICE_BYTES = 160 << 20
#: The ioctl that makes a device read as zeros, with discards where it can.
BLKZEROOUT = 0x127F
#: What a member can be, by the letters of a place's name.
PLACES = {
    "file": ("file",),
    "device": ("device",),
    "partition": ("partition",),
    "device and file": ("device", "file"),
    "partition, file, device": ("partition", "file", "device"),
}


class BlockDevices:
    """A whole device and a partition, blank whenever they are asked for; ``missing`` says why there are none."""

    def __init__(self, device: str, partition: str, missing: str = "") -> None:
        self._paths = {"device": device, "partition": partition}
        self.missing = missing

    def blank(self, kind: str) -> str:
        if self.missing:
            pytest.skip(self.missing)
        path = self._paths[kind]
        with open(path, "r+b", buffering=0) as raw:
            size = raw.seek(0, os.SEEK_END)
            fcntl.ioctl(raw, BLKZEROOUT, struct.pack("<QQ", 0, size))
        return path

    def paths(self, place: str, folder: Path) -> list[Path]:
        """Returns the members of ``place``; files are new ones in ``folder``."""
        return [
            folder / f"member{index}" if kind == "file" else Path(self.blank(kind))
            for index, kind in enumerate(PLACES[place])
        ]


@contextmanager
def partition_of(device: str) -> Iterator[str]:
    """Yields the first partition of ``device``, told to the kernel directly: it need not know partition tables."""
    if shutil.which("addpart") is None:
        pytest.skip("partitions need addpart from util-linux")
    sectors = (DEVICE_BYTES - (2 << 20)) // 512
    done = subprocess.run(
        ["addpart", device, "1", "2048", str(sectors)], capture_output=True, text=True, check=False
    )
    path = f"{device}p1"
    if done.returncode != 0 or not Path(path).is_block_device():
        pytest.skip(f"no partition: {done.stderr.strip() or 'its device file did not appear'}")
    try:
        yield path
    finally:
        subprocess.run(["delpart", device, "1"], check=False)


@pytest.fixture(scope="session")
def block_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockDevices]:
    folder = tmp_path_factory.mktemp("loop")
    with ExitStack() as stack:
        try:
            whole = stack.enter_context(loop_device(folder / "whole", DEVICE_BYTES))
            cut = stack.enter_context(loop_device(folder / "cut", DEVICE_BYTES))
            part = stack.enter_context(partition_of(cut))
        except pytest.skip.Exception as reason:
            yield BlockDevices("", "", missing=str(reason))
            return
        yield BlockDevices(whole, part)


@pytest.fixture(params=list(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path, block_devices: BlockDevices) -> list[Path]:
    """The paths of a store's members: one to three, of every kind."""
    return block_devices.paths(request.param, tmp_path)
