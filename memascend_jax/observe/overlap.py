# SPDX-License-Identifier: Apache-2.0
"""How much of a run's I/O hides behind computing, phase by phase, from its timeline.

In a phase, C is the time when a stage or an optimizer tile was computed and I the time when a read or a write was on
its way, from submission to completion. The overlap is |C ∩ I| / min(|C|, |I|): the share of the shorter of the two that
ran under the other. A commit's own work is flushing: its overlap is the share of it that ran under computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memascend_jax.observe.trace import COMPUTE, PHASE, READ, UPDATE, WRITE

Interval = tuple[float, float]
STEP_PHASES = ("forward", "backward")
COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of all occurrences of one phase together, in seconds: its length, computing, I/O, and both at once."""

    phase: str
    count: int
    seconds: float
    compute_s: float
    io_s: float
    both_s: float

    @property
    def share(self) -> float | None:
        """The overlap, 0 to 1; None where one of the two is missing."""
        if self.phase == COMMIT:
            return self.both_s / self.seconds if self.seconds else None
        shorter = min(self.compute_s, self.io_s)
        return self.both_s / shorter if shorter > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the share."""
        return {
            "phase": self.phase,
            "count": self.count,
            "seconds": round(self.seconds, 6),
            "compute_s": round(self.compute_s, 6),
            "io_s": round(self.io_s, 6),
            "both_s": round(self.both_s, 6),
            "overlap": None if self.share is None else round(self.share, 4),
        }


def phase_overlaps(events: Iterable[Mapping[str, Any]]) -> list[Overlap]:
    """Returns the overlap of each phase in ``events``, in the order of their first occurrence.

    The first occurrence of a phase compiles and is left out when there are more.
    """
    phases: dict[str, list[Interval]] = defaultdict(list)
    busy: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            continue
        interval = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        (phases[event["name"]] if category == PHASE else busy[category]).append(interval)
    computing = merged([*busy[COMPUTE], *busy[UPDATE]])
    moving = merged([*busy[READ], *busy[WRITE]])
    ordered = sorted(_while_training(phases).items(), key=lambda item: min(item[1]))
    return [_overlap(name, sorted(windows), computing, moving) for name, windows in ordered]


def _while_training(phases: Mapping[str, Sequence[Interval]]) -> dict[str, list[Interval]]:
    """Returns the parts of ``phases`` between the first forward and the end of the last backward.

    What is updated and committed before and after has no step to hide behind.
    """
    steps = [window for name in STEP_PHASES for window in phases.get(name, ())]
    if not steps:
        return {}
    training = [(min(begin for begin, _ in steps), max(end for _, end in steps))]
    inside = {name: common(sorted(windows), training) for name, windows in phases.items()}
    return {name: windows for name, windows in inside.items() if windows}


def _overlap(
    name: str, windows: Sequence[Interval], computing: Sequence[Interval], moving: Sequence[Interval]
) -> Overlap:
    steady = merged(windows[1:] if len(windows) > 1 else windows)
    compute = common(steady, computing)
    io = steady if name == COMMIT else common(steady, moving)
    lengths = (_seconds(intervals) for intervals in (steady, compute, io, common(compute, io)))
    return Overlap(name, max(len(windows) - 1, 1), *lengths)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of ``intervals`` as disjoint ones in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        elif end > begin:
            union.append((begin, end))
    return union


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the intersection of two unions of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e6
