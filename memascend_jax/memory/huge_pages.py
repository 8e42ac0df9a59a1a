# SPDX-License-Identifier: Apache-2.0
"""How much of a piece of memory really lies in huge pages: the kernel takes the advice when it can, and is silent."""

from __future__ import annotations

import re
from pathlib import Path

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def huge_page_bytes(address: int, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> int | None:
    """Returns the bytes of [address, address + nbytes) in transparent huge pages; None where the kernel does not tell.

    The kernel counts per mapping: of one that reaches beyond the range no more than its part inside is taken. Walks the
    page tables of the whole process, which takes milliseconds: not for the step path.
    """
    try:
        lines = smaps.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    huge, inside = 0, 0
    for line in lines:
        if line.startswith("AnonHugePages:"):
            huge += min(int(line.split()[1]) * 1024, inside)
        elif mapping := _MAPPING.match(line):
            begin, end = (int(bound, 16) for bound in mapping.groups())
            inside = max(min(end, address + nbytes) - max(begin, address), 0)
    return huge
