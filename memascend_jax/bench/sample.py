# SPDX-License-Identifier: Apache-2.0
"""Repeated measurements and what they say: wall time and processor time of one piece of work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memascend_jax.units import GIB


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. ``cpu_s``: user and system time of the process, all threads."""

    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Series:
    """The measurements of one contender in one case, each of ``nbytes``; ``error`` when it could not run."""

    contender: str
    case: str
    nbytes: int
    samples: list[Sample] = field(default_factory=list)
    error: str = ""
    note: str = ""

    @property
    def bytes_per_s(self) -> float:
        """The median speed."""
        return self.nbytes / statistics.median(sample.seconds for sample in self.samples)

    @property
    def cpu_s_per_gib(self) -> float:
        """The median processor time per GiB moved."""
        return statistics.median(sample.cpu_s for sample in self.samples) * GIB / self.nbytes

    def to_json(self) -> dict[str, Any]:
        """Returns median, spread and extremes; speeds in bytes per second."""
        facts: dict[str, Any] = {"contender": self.contender, "case": self.case, "bytes": self.nbytes}
        if self.note:
            facts["note"] = self.note
        if not self.samples:
            return {**facts, "error": self.error or "not run"}
        speeds = [self.nbytes / sample.seconds for sample in self.samples]
        middle = statistics.median(speeds)
        return {
            **facts,
            "rounds": len(speeds),
            "median": self.bytes_per_s,
            "mad": statistics.median(abs(speed - middle) for speed in speeds),
            "min": min(speeds),
            "max": max(speeds),
            "cpu_s_per_gib": self.cpu_s_per_gib,
        }


def timed(work: Callable[[], object]) -> Sample:
    """Returns how long ``work`` took and what it cost the processor."""
    before, began = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return Sample(seconds, time.process_time() - before)


def paired_ratio(of: Series, to: Series) -> float | None:
    """Returns the median over rounds of ``of``'s speed by ``to``'s, measured one after the other; None without both.

    Disks drift over minutes; neighbours in time share the drift.
    """
    pairs = list(zip(of.samples, to.samples, strict=False))
    if not pairs:
        return None
    scale = of.nbytes / to.nbytes
    return statistics.median(other.seconds * scale / own.seconds for own, other in pairs)


def find(series: Sequence[Series], contender: str, case: str) -> Series | None:
    """Returns the series of ``contender`` in ``case``."""
    return next((s for s in series if (s.contender, s.case) == (contender, case)), None)
