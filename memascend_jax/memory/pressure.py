# SPDX-License-Identifier: Apache-2.0
"""What a run does when memory gets short: it gives back what it does not use, and waits when others took the rest.

A run was planned into the memory that was free at its start. What it has by then is its own; what it still needs may
be gone later. Taking it all the same ends in the kernel killing a process, most likely this one, the largest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memascend_jax.memory.allocator import trim_heap
from memascend_jax.memory.cgroup import pressure_file
from memascend_jax.memory.meter import MemoryRoom, memory_room, resident_bytes
from memascend_jax.units import MIB, format_bytes, format_duration

#: As near as this to what was planned, freed memory is given back; and again when as much has come on top.
_NEAR_PLAN_BYTES = 32 * MIB
#: The kernel is asked no more often than this; it costs about 0.1 ms.
_LOOK_EVERY_S = 0.25
#: Nobody may come to give memory back: after this the run goes on, and takes its chance.
_LONGEST_WAIT_S = 60.0
#: From this share of time on that tasks wait for memory it is worth a line, once in a while.
_STALLED_PERCENT = 10.0
_SAY_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Less memory is left than a run may still take, in bytes."""

    room: MemoryRoom
    resident_bytes: int
    planned_bytes: int

    @property
    def missing_bytes(self) -> int:
        """What the run may still take; more than there is."""
        return self.planned_bytes - self.resident_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.room.available_bytes)} available {self.room.where}, but this run may still take "
            f"{format_bytes(self.missing_bytes)} (it has {format_bytes(self.resident_bytes)} of the "
            f"{format_bytes(self.planned_bytes)} planned)"
        )


class MemoryWatch:
    """Looks whether the memory that a run was planned into is still there.

    Args:
        planned_bytes: the resident memory that the process will have at its peak.
        say: takes the warnings.
        root: where ``/proc`` and the cgroup mounts are looked for; another folder in tests.
        resident_bytes: what the process has now.

    Threading: belongs to the thread that drives the step.
    """

    def __init__(
        self,
        planned_bytes: int,
        say: Callable[[str], None],
        *,
        root: Path = Path("/"),
        resident_bytes: Callable[[], int] = resident_bytes,
        look_every_s: float = _LOOK_EVERY_S,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        self._planned_bytes = planned_bytes
        self._say = say
        self._root = root
        self._resident_bytes = resident_bytes
        self._look_every_s = look_every_s
        self._longest_wait_s = longest_wait_s
        self._looked_s = self._said_s = float("-inf")
        self._trim_at_bytes = planned_bytes - _NEAR_PLAN_BYTES
        #: Waiting did not help: until memory is back, the run is not held up any more.
        self._resigned = False

    def keep_to_plan(self) -> None:
        """Gives freed memory that the C library keeps back when the process comes near what was planned. Cheap.

        How much the library keeps depends on the order in which blocks of many sizes come and go; the plan has a
        share for it, and this keeps it to that.
        """
        if self._resident_bytes() < self._trim_at_bytes:
            return
        trim_heap()
        near = self._planned_bytes - _NEAR_PLAN_BYTES
        self._trim_at_bytes = max(near, self._resident_bytes() + _NEAR_PLAN_BYTES)

    def is_short(self) -> bool:
        """Returns whether ``wait`` has something to wait for. Cheap: the kernel is asked now and then only."""
        now = time.monotonic()
        if now - self._looked_s < self._look_every_s:
            return False
        self._looked_s = now
        shortage = self.shortage()
        if shortage is None:
            self._resigned = False
            self._tell_stalls(now)
        return shortage is not None and not self._resigned

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Waits until there is memory again, ``stopped``, or it took too long; says what it waits for, and how it went.

        Freed memory that the C library keeps is given back first.
        """
        trim_heap()
        shortage = self.shortage()
        if shortage is None:
            return
        limit = format_duration(self._longest_wait_s)
        self._say(f"warning: memory is short: {shortage}. Waiting for it, up to {limit}{self._stalls()}")
        began = time.monotonic()
        while shortage is not None and not stopped():
            if time.monotonic() - began >= self._longest_wait_s:
                self._resigned = True
                self._say(
                    f"warning: memory is still short after {limit}: {shortage}. Going on all the same; the kernel may "
                    "end this process or another. Stop what else takes memory, or stop this run and go on with a "
                    "smaller offload.host_memory"
                )
                return
            time.sleep(self._look_every_s)
            shortage = self.shortage()
        if shortage is None:
            self._say(f"there is memory again after {format_duration(time.monotonic() - began)}: going on")

    def shortage(self) -> Shortage | None:
        """Returns what is missing now, or None."""
        room, resident = memory_room(self._root), self._resident_bytes()
        if room.available_bytes >= self._planned_bytes - resident:
            return None
        return Shortage(room, resident, self._planned_bytes)

    def _tell_stalls(self, now: float) -> None:
        stalled = stalled_percent(self._root)
        if stalled is not None and stalled >= _STALLED_PERCENT and now - self._said_s >= _SAY_EVERY_S:
            self._said_s = now
            room = memory_room(self._root)
            self._say(
                f"warning: memory is under pressure{self._stalls()}; {format_bytes(room.available_bytes)} are "
                f"available {room.where}"
            )

    def _stalls(self) -> str:
        stalled = stalled_percent(self._root)
        return "" if stalled is None else f": tasks waited for memory {stalled:.0f} % of the last 10 s"


def stalled_percent(root: Path = Path("/")) -> float | None:
    """Returns the share of the last ten seconds in which some task waited for memory; None where it is not counted.

    That of the process's cgroup where there is one, else the machine's. Source: Documentation/accounting/psi.rst.
    """
    for path in (pressure_file(root), root / "proc/pressure/memory"):
        try:
            lines = path.read_text(encoding="ascii").splitlines() if path is not None else []
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[:1] == ["some"] and words[1].startswith("avg10="):
                return float(words[1].removeprefix("avg10="))
    return None
