# SPDX-License-Identifier: Apache-2.0
"""What each member has done in this session: bytes, requests, how long they took, how many were in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memascend_jax.storage.layout import Int64Array


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    """One member's traffic, metadata included.

    ``read_latency`` and ``write_latency``: requests that took less than 2^k microseconds and not less than half of
    that, for k = 0, 1, …; empty when the engine does not measure. ``queue_depth``: requests in flight, on average
    while any was; 0 when not measured.
    """

    path: str
    read_bytes: int = 0
    write_bytes: int = 0
    read_requests: int = 0
    write_requests: int = 0
    read_latency: tuple[int, ...] = ()
    write_latency: tuple[int, ...] = ()
    queue_depth: float = 0.0
    queue_depth_max: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and the latencies' quantiles in seconds."""
        quantiles = {
            f"{direction}_latency_p{percent}_s": latency_quantile(histogram, percent / 100)
            for direction, histogram in (("read", self.read_latency), ("write", self.write_latency))
            for percent in (50, 99)
            if any(histogram)
        }
        return {**asdict(self), **quantiles}


def latency_quantile(histogram: Sequence[int], part: float) -> float:
    """Returns the seconds within which ``part`` of the requests ended: the upper edge of the bucket it falls in."""
    below = np.cumsum(histogram)
    return float(2.0 ** int(np.searchsorted(below, part * below[-1]))) * 1e-6


class Traffic:
    """Counts the bytes that go to each member: what an engine that knows only totals cannot tell."""

    def __init__(self, members: int) -> None:
        self.bytes = {"read": np.zeros(members, np.int64), "write": np.zeros(members, np.int64)}

    def add(self, direction: str, segments: Int64Array) -> None:
        """Counts ``segments`` of (member, offset, address, nbytes)."""
        counts = self.bytes[direction]
        if len(counts) == 1:
            counts[0] += segments[:, 3].sum()
        else:
            np.add.at(counts, segments[:, 0], segments[:, 3])


def member_statistics(
    paths: Sequence[str], traffic: Traffic, engine_members: Sequence[Mapping[str, Any]] | None
) -> list[MemberStatistics]:
    """Returns the statistics of each member: the engine's where it keeps them, else the bytes given to it."""
    found = []
    for index, path in enumerate(paths):
        if engine_members is not None:
            known: dict[str, Any] = {
                name: tuple(value) if isinstance(value, (list, tuple, np.ndarray)) else value
                for name, value in engine_members[index].items()
                if name in MemberStatistics.__slots__
            }
            found.append(MemberStatistics(**{**known, "path": path}))
            continue
        read, write = int(traffic.bytes["read"][index]), int(traffic.bytes["write"][index])
        found.append(MemberStatistics(path, read_bytes=read, write_bytes=write))
    return found
