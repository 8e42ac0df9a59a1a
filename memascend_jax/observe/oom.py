# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has killed somebody for lack of memory: a killed process cannot say so itself.

The kernel counts in ``/proc/vmstat`` and does not say whom it killed, so this is told as what it is, a likely reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def oom_count(root: Path = Path("/")) -> dict[str, Any]:
    """Returns ``boot_id`` and ``oom_kills``, the processes killed for lack of memory since that boot; None if unknown.

    Args:
        root: where ``/proc`` is looked for; another folder in tests.
    """
    return {
        "boot_id": _text(root / "proc/sys/kernel/random/boot_id"),
        "oom_kills": _kills(_text(root / "proc/vmstat")),
    }


def oom_kills_since(earlier: Mapping[str, Any], root: Path = Path("/")) -> int:
    """Returns how many processes were killed for lack of memory since ``oom_count`` returned ``earlier``.

    0 where that cannot be known: after another boot, on another machine, on an old kernel.
    """
    now, before = oom_count(root), earlier.get("oom_kills")
    if now["boot_id"] is None or now["boot_id"] != earlier.get("boot_id"):
        return 0
    if not isinstance(before, int) or now["oom_kills"] is None:
        return 0
    return max(int(now["oom_kills"]) - before, 0)


def _kills(text: str | None) -> int | None:
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
