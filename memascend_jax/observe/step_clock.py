# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a step go, as exclusive spans of the thread that drives it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memascend_jax.observe import trace

SPANS = (
    "ssd_read_wait",
    "ssd_write_wait",
    "host_to_device",
    "device_to_host",
    "optimizer",
    "commit",
    "memory_wait",
)


class StepClock:
    """Adds up the time spent in each of ``SPANS``; a span inside another counts for the inner one only.

    ``compute`` is what remains of the step: dispatching stage functions and waiting for their results.
    Not thread-safe: one clock belongs to one thread.
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(SPANS, 0.0)
        self._inner = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the time inside the block, less that of spans within it, as ``name``."""
        outer_inner, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            elapsed = end - start
            if trace.current is not None:
                _record(trace.current, name, start, end)
            self._spent[name] += elapsed - self._inner
            self._inner = outer_inner + elapsed

    def lap(self) -> dict[str, float]:
        """Returns ``step_seconds`` and its split since the last lap, in seconds, and starts anew."""
        now = time.perf_counter()
        total = now - self._started
        split = {name: round(seconds, 6) for name, seconds in self._spent.items()}
        split["compute"] = round(total - sum(self._spent.values()), 6)
        self._spent = dict.fromkeys(SPANS, 0.0)
        self._started = now
        return {"step_seconds": round(total, 6), **split}


def _record(recorder: trace.Recorder, name: str, begin_s: float, end_s: float) -> None:
    """Puts a span on the timeline; in seconds of ``time.perf_counter``."""
    category = trace.COPY if name in ("host_to_device", "device_to_host") else trace.WAIT
    recorder.add_here(category, name, round(begin_s * 1e9), round(end_s * 1e9))
