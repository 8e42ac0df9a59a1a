# SPDX-License-Identifier: Apache-2.0
"""The roof: fio with io_uring on a file or device of the same disk, at the best of the settings tried.

fio's time is what it reports of its job, without its start; its processor time likewise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend_jax.bench.sample import Sample
from memascend_jax.errors import MachineError
from memascend_jax.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class FioSetting:
    """How fio does its I/O. ``memory``: ``malloc`` (4 KiB pages) or ``mmaphuge`` (2 MiB pages)."""

    block_bytes: int
    depth: int
    memory: str
    fixed_buffers: bool = True

    def __str__(self) -> str:
        size = (
            f"{self.block_bytes // MIB} MiB" if self.block_bytes >= MIB else f"{self.block_bytes // KIB} KiB"
        )
        pages = "huge pages" if self.memory == "mmaphuge" else "small pages"
        return f"{size} x {self.depth}, {pages}"


def available() -> str:
    """Returns why fio cannot be run here, or an empty text."""
    return "" if shutil.which("fio") else "fio is not installed"


def huge_pages_free() -> int:
    """Returns the bytes of free huge pages that fio could map."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    count, size = fields.get("HugePages_Free", "0"), fields.get("Hugepagesize", "0 kB")
    return int(count) * int(size.split()[0]) * KIB


def settings(kind: str) -> list[FioSetting]:
    """Returns the settings worth trying for ``kind``; huge pages only where some are reserved."""
    memories = ["malloc"] + (["mmaphuge"] if huge_pages_free() >= 40 * MIB else [])
    if kind == "randread":
        return [FioSetting(8 * KIB, depth, "malloc") for depth in (32, 64, 128, 256)]
    return [
        FioSetting(block, depth, memory)
        for memory in memories
        for block, depth in ((256 * KIB, 32), (MIB, 8), (MIB, 32), (4 * MIB, 8))
        if memory == "malloc" or block * depth <= huge_pages_free()
    ]


def lay_out(path: str, nbytes: int) -> None:
    """Makes a file of ``nbytes`` that has been written once, as a file in use has."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        piece = os.urandom(4 * MIB)
        for begin in range(0, nbytes, len(piece)):
            os.pwrite(fd, piece[: nbytes - begin], begin)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def run(path: str, kind: str, nbytes: int, setting: FioSetting, file_bytes: int | None = None) -> Sample:
    """Returns the time of moving ``nbytes`` with fio.

    Args:
        kind: ``read``, ``write``, ``rw`` (half of each) or ``randread``.
        file_bytes: the part of the path that is used; None: ``nbytes``.

    Raises:
        MachineError: fio fails; the message is its own.
    """
    command = [
        "fio",
        "--name=roof",
        # First: the engine's own options are unknown before it.
        "--ioengine=io_uring",
        f"--filename={path}",
        f"--rw={kind}",
        f"--bs={setting.block_bytes}",
        f"--size={file_bytes or nbytes}",
        f"--io_size={nbytes}",
        f"--iodepth={setting.depth}",
        f"--mem={setting.memory}",
        f"--fixedbufs={int(setting.fixed_buffers)}",
        "--registerfiles=1",
        "--direct=1",
        "--randrepeat=0",
        "--norandommap=1",
        "--allow_file_create=0",
        "--output-format=json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode != 0:
        raise MachineError(f"cannot run fio on '{path}': {(done.stderr or done.stdout).strip()[:300]}")
    # Warnings come before the object.
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    # Milliseconds are too coarse for short jobs; bandwidth would be computed from them.
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(seconds * nbytes / moved, cpu * nbytes / moved)
