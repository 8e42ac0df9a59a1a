# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on: without it a number means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memascend_jax import __version__


def describe_machine(paths: Sequence[str]) -> dict[str, Any]:
    """Returns processor, kernel, memory, the disks behind ``paths``, and versions."""
    from memascend_jax._native import _core

    return {
        "version": __version__,
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": _core.cpu_isa(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "fio": _first_line("fio", "--version"),
        "load": os.getloadavg()[0],
        "disks": [_disk(path) for path in paths],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _disk(path: str) -> dict[str, Any]:
    """Returns the device behind ``path`` and what its queue allows, as far as the kernel tells."""
    where = Path(path) if Path(path).exists() else Path(path).parent
    status = where.stat()
    number = status.st_rdev if where.is_block_device() else status.st_dev
    home = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    facts: dict[str, Any] = {"path": path, "device": home.resolve().name if home.exists() else "unknown"}
    for name in ("max_sectors_kb", "max_segments", "scheduler", "rotational"):
        for queue in (home / "queue", home / ".." / "queue"):
            if (queue / name).exists():
                facts[name] = (queue / name).read_text(encoding="ascii").strip()
                break
    return facts


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.splitlines()[0] if done.stdout else ""
