# SPDX-License-Identifier: Apache-2.0
"""A timeline of a run for Perfetto (https://ui.perfetto.dev): transfers, stages, tiles, commits, and waits.

The recorder is the process's, as logging is: what is worth recording happens in every layer, and a run has one
timeline. Without one, ``span`` returns a shared object that does nothing and ``current`` is None, so that a place that
records costs a look at a variable and allocates nothing.

Times are nanoseconds of ``time.perf_counter_ns``, the clock that the native core uses too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from memascend_jax.observe.trace_writer import Event, TraceWriter

if TYPE_CHECKING:
    from memascend_jax.observe.array_watch import ArrayWatch, Awaitable

#: Categories of events: what the reader adds up.
PHASE, COMPUTE, UPDATE, COPY, WAIT, READ, WRITE = (
    "phase",
    "compute",
    "update",
    "copy",
    "wait",
    "read",
    "write",
)

#: Waits below this are the cost of asking.
_SHORTEST_WAIT_NS = 20_000

#: The process's recorder, or None: read it, do not set it.
current: Recorder | None = None


class Recorder:
    """Takes events from any thread and passes them to a writer that keeps the newest few thousand at most."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._phase: tuple[str, int] | None = None
        self._watches: list[ArrayWatch] = []
        self._copies: ArrayWatch | None = None
        #: The computation's watch, once there is one.
        self.compute: ArrayWatch | None = None
        #: What the thread that drives the step is working on.
        self.stage = ""

    def add(
        self,
        category: str,
        track: str,
        name: str,
        begin_ns: int,
        end_ns: int,
        facts: dict[str, int] | None = None,
        *,
        overlapping: bool = False,
    ) -> None:
        """Records that ``name`` went on from ``begin_ns`` to ``end_ns``.

        Args:
            track: the row of the timeline. Events of one row must nest, unless they are ``overlapping``: those get as
                many rows as they need.
            facts: numbers shown with the event.
        """
        self._writer.put(Event(category, track, name, begin_ns, end_ns, facts, overlapping))

    def add_here(self, category: str, name: str, begin_ns: int, end_ns: int) -> None:
        """Records ``name`` on the row of this thread, unless it is a wait of no length."""
        if category != WAIT or end_ns - begin_ns >= _SHORTEST_WAIT_NS:
            self.add(category, threading.current_thread().name, name, begin_ns, end_ns)

    def count(self, name: str, values: dict[str, int]) -> None:
        """Records the values of a counter now; several values are drawn stacked."""
        now = time.perf_counter_ns()
        self._writer.put(Event("", "", name, now, now, values, False))

    def watch_computing(self) -> ArrayWatch:
        """Returns the watch of what the device computes; phases begin and end in its time from now on."""
        self.compute = self._new_watch(COMPUTE, "device")
        return self.compute

    def copied(self, name: str, at_ns: int, result: Awaitable) -> None:
        """Records a copy to the device that was started at ``at_ns`` and ends with ``result``."""
        if self._copies is None:
            self._copies = self._new_watch(COPY, "copy to device")
        self._copies.dispatched(name, at_ns, [result])

    def _new_watch(self, category: str, track: str) -> ArrayWatch:
        from memascend_jax.observe.array_watch import ArrayWatch

        self._watches.append(ArrayWatch(self, category, track))
        return self._watches[-1]

    def phase(self, name: str | None) -> None:
        """Begins phase ``name`` (None: none) and ends the one before, once what is dispatched has been computed."""
        if self.compute is not None:
            self.compute.mark(lambda now: self._begin_phase(name, now))
        else:
            self._begin_phase(name, time.perf_counter_ns())

    def _begin_phase(self, name: str | None, now: int) -> None:
        if self._phase is not None:
            self.add(PHASE, "phase", self._phase[0], self._phase[1], now)
        self._phase = None if name is None else (name, now)

    def close(self) -> None:
        """Waits for the computations that are watched and writes everything that is left."""
        self.phase(None)
        for watch in self._watches:
            watch.close()
        self._writer.close()


def span(category: str, name: str, detail: object = "") -> AbstractContextManager[None]:
    """Returns a context manager that records its block as ``name`` and ``detail`` on the row of the thread."""
    return _NOTHING if current is None else _Span(current, category, name, detail)


def phase(name: str | None) -> None:
    """Begins the phase ``name`` of the step and ends the one before; None ends it only."""
    if current is not None:
        current.phase(name)


@contextmanager
def recording(path: Path) -> Iterator[Recorder]:
    """Records into ``path`` while the block runs; a name that ends with ``.gz`` is compressed.

    A file of that name is replaced.

    Raises:
        OSError: the file cannot be made. That the disk fills up later ends the recording, not the run.
        RuntimeError: the process records already.
    """
    global current
    if current is not None:
        raise RuntimeError("a process has one trace at a time; end the other recording first")
    recorder = Recorder(TraceWriter(path))
    current = recorder
    try:
        yield recorder
    finally:
        current = None
        recorder.close()


class _Span:
    __slots__ = ("_begin", "_category", "_detail", "_name", "_recorder")

    def __init__(self, recorder: Recorder, category: str, name: str, detail: object) -> None:
        self._recorder = recorder
        self._category = category
        self._name = name
        self._detail = detail
        self._begin = 0

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.perf_counter_ns()
        name = f"{self._name} {self._detail}" if self._detail != "" else self._name
        self._recorder.add_here(self._category, name, self._begin, end)


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NOTHING = _Nothing()
