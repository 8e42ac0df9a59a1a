# SPDX-License-Identifier: Apache-2.0
"""The roof: fio with io_uring on an extent of the very files or devices, at the best of the settings tried.

fio's time is what it reports of its job, without its start; its processor time likewise. The extent must have been
written before: what is only reserved reads as zeros without any I/O, and a first write to it costs more.
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
    """How fio does its I/O.

    ``memory``: ``small`` for pages of 4 KiB, ``huge`` for memory that the kernel was advised to keep in huge pages,
    as the store's arena is, ``reserved`` for huge pages that were set aside.
    """

    block_bytes: int
    depth: int
    memory: str

    def __str__(self) -> str:
        size = (
            f"{self.block_bytes // MIB} MiB" if self.block_bytes >= MIB else f"{self.block_bytes // KIB} KiB"
        )
        return f"{size} x {self.depth}, {self.memory} pages"


@dataclass(frozen=True, slots=True)
class FioRegion:
    """``nbytes`` in all, the same part at ``offset`` of each of ``paths``."""

    paths: tuple[str, ...]
    offset: int
    nbytes: int

    def first(self, nbytes: int, setting: FioSetting) -> FioRegion:
        """Returns about ``nbytes`` of it, in whole requests on each path: as much as somebody else uses."""
        unit = setting.block_bytes * len(self.paths)
        return FioRegion(self.paths, self.offset, min(max(nbytes // unit, 1) * unit, self.nbytes))


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


def settings(kind: str, nbytes: int) -> list[FioSetting]:
    """Returns the settings worth trying for ``kind`` on ``nbytes``."""
    if kind == "randread":
        return [
            FioSetting(8 * KIB, depth, memory) for memory in ("small", "huge") for depth in (64, 128, 256)
        ]
    shapes = [(256 * KIB, 32), (MIB, 8), (MIB, 32), (MIB, 64), (2 * MIB, 16), (4 * MIB, 8), (4 * MIB, 16)]
    reserved = huge_pages_free()
    return [
        FioSetting(block, depth, memory)
        for memory in ("small", "huge", "reserved")
        for block, depth in (shapes if memory == "huge" else [(MIB, 32), (4 * MIB, 8)])
        if block <= nbytes and (memory != "reserved" or block * depth <= reserved)
    ]


def run(region: FioRegion, kind: str, nbytes: int, setting: FioSetting) -> Sample:
    """Returns the time of moving ``nbytes`` with fio.

    Args:
        kind: ``read``, ``write``, ``rw`` (half of each) or ``randread``.

    Raises:
        MachineError: fio fails; the message is its own.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    if setting.memory == "huge":
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    done = subprocess.run(
        _command(region, kind, nbytes, setting),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        names = ", ".join(region.paths)
        raise MachineError(f"cannot run fio on '{names}': {(done.stderr or done.stdout).strip()[:300]}")
    # Warnings come before the object.
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    # Milliseconds are too coarse for short jobs; bandwidth would be computed from them.
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(seconds * nbytes / moved, cpu * nbytes / moved)


def _command(region: FioRegion, kind: str, nbytes: int, setting: FioSetting) -> list[str]:
    return [
        "fio",
        "--name=roof",
        # First: the engine's own options are unknown before it.
        "--ioengine=io_uring",
        "--filename=" + ":".join(path.replace(":", "\\:") for path in region.paths),
        f"--rw={kind}",
        f"--bs={setting.block_bytes}",
        f"--offset={region.offset}",
        f"--size={region.nbytes}",
        f"--io_size={nbytes}",
        f"--iodepth={setting.depth}",
        f"--mem={'mmaphuge' if setting.memory == 'reserved' else 'malloc'}",
        "--fixedbufs=1",
        "--registerfiles=1",
        "--direct=1",
        # Neither renewing what is written nor dropping caches belongs to the work.
        "--scramble_buffers=0",
        "--invalidate=0",
        "--randrepeat=0",
        "--norandommap=1",
        "--allow_file_create=0",
        "--output-format=json",
    ]
