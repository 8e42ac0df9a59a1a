# SPDX-License-Identifier: Apache-2.0
"""When dispatched computations and copies really ran: a thread waits for their results, one after the other.

A device works through what is dispatched in order, so a computation began when it was dispatched or when the one
before it ended, whichever was later. Waiting on another thread disturbs nothing that the run overlaps.

Known shortcoming: when all results of a computation have been donated to the next one before they were waited for,
the two become one event.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from memascend_jax.observe.trace import Recorder

#: Results that are held at once; a computation beyond that becomes one event with the next.
_MAX_HELD = 256
#: Of the results of one computation this many are held, the smallest: any of them tells when all are there.
_HELD_OF_EACH = 3


class Awaitable(Protocol):
    """A jax array."""

    @property
    def nbytes(self) -> int: ...
    def is_deleted(self) -> bool: ...
    def block_until_ready(self) -> object: ...


class _Dispatched(NamedTuple):
    name: str
    at_ns: int
    results: Sequence[Awaitable]


class ArrayWatch:
    """Records what a device does on the row ``track``, in the order in which it was dispatched.

    Threading: ``dispatched`` and ``mark`` are called by one thread.
    """

    def __init__(self, recorder: Recorder, category: str, track: str) -> None:
        self._recorder = recorder
        self._category = category
        self._track = track
        self._queue: queue.SimpleQueue[_Dispatched | Callable[[int], None] | None] = queue.SimpleQueue()
        self._free_ns = 0
        self._unfinished: _Dispatched | None = None
        self._thread = threading.Thread(target=self._run, name=f"trace-{track}", daemon=True)
        self._thread.start()

    def dispatched(self, name: str, at_ns: int, results: Sequence[Awaitable]) -> None:
        """Says that ``name`` was dispatched at ``at_ns`` and ends with ``results``."""
        held: Sequence[Awaitable] = ()
        if self._queue.qsize() < _MAX_HELD:
            held = sorted(results, key=lambda result: result.nbytes)[:_HELD_OF_EACH]
        self._queue.put(_Dispatched(name, at_ns, held))

    def mark(self, call: Callable[[int], None]) -> None:
        """Calls ``call`` with the time when all that was dispatched so far had ended."""
        self._queue.put(call)

    def close(self) -> None:
        """Waits for everything dispatched; does nothing the second time."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Dispatched):
                self._finish(item)
            else:
                item(time.perf_counter_ns())
            # Nothing is held while the next result is awaited.
            del item

    def _finish(self, item: _Dispatched) -> None:
        before, self._unfinished = self._unfinished, None
        if before is not None:
            item = _Dispatched(f"{before.name}, {item.name}", before.at_ns, item.results)
        if not _wait(item.results):
            self._unfinished = item._replace(results=())
            return
        now = time.perf_counter_ns()
        begin = min(max(item.at_ns, self._free_ns), now)
        self._recorder.add(self._category, self._track, item.name, begin, now)
        self._free_ns = now


def _wait(results: Sequence[Awaitable]) -> bool:
    """Waits for the first of ``results`` that still exists; False when none does."""
    for result in results:
        try:
            if not result.is_deleted():
                result.block_until_ready()
                return True
        except RuntimeError:
            # Donated between the two calls, or the computation failed, which its own caller is told.
            continue
    return False
