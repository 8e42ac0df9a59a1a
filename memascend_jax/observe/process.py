# SPDX-License-Identifier: Apache-2.0
"""Which process wrote something, so that another one can tell later whether it still runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Returns ``pid`` of this process and what keeps another of the same number apart: its start in clock ticks
    after the machine's, the host, and the namespace that numbers the processes of a container."""
    pid = os.getpid()
    return {"pid": pid, "pid_start": _start(pid), **_where()}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Returns whether the process that ``this_process`` described has ended.

    False as well where that cannot be seen: on another host, from another container.
    """
    pid, here = process.get("pid"), _where()
    if not isinstance(pid, int) or any(process.get(key) != value for key, value in here.items()):
        return False
    return _start(pid) != process.get("pid_start")


def _where() -> dict[str, str]:
    return {"host": platform.node(), "pid_namespace": str(Path("/proc/self/ns/pid").readlink())}


def _start(pid: int) -> int | None:
    """The time of its start, or None when there is no such process; see proc_pid_stat(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; the third field follows it, the start is the 22nd.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
