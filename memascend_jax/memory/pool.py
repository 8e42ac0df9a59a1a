# SPDX-License-Identifier: Apache-2.0
"""The only lender of pinned memory: exactly sized slots in classes, all taken from the arena at the start.

Size classes come from the plan, one per tensor shape that streams, so that no slot is larger than what it holds.
Source: the adaptive buffer pool of MemAscend (arXiv 2505.23254, section IV-B).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from memascend_jax.errors import RunError
from memascend_jax.memory.arena import PinnedArena, Slot
from memascend_jax.memory.lease import Lease, Pending
from memascend_jax.observe import trace

__all__ = ["Lease", "SizeClass", "SlotPool"]

_log = logging.getLogger(__name__)

#: Nothing wakes a waiter when an I/O ticket ends, so one that waits for tickets looks this often.
_TICKET_POLL_S = 0.001
#: Otherwise releases and leaving readers wake it; this bounds how late a signal handler runs.
_LONGEST_PAUSE_S = 0.05
#: A wait of this length is worth a line in the log.
_SLOW_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class SizeClass:
    """``count`` slots of ``nbytes`` bytes each."""

    nbytes: int
    count: int


@dataclass(slots=True)
class _Draining:
    slot: Slot
    pending: list[Pending]

    def idle(self) -> bool:
        return self.slot.readers == 0 and all(work.done() for work in self.pending)


@dataclass(slots=True)
class _Class:
    size: SizeClass
    free: list[Slot] = field(default_factory=list)
    draining: deque[_Draining] = field(default_factory=deque)
    leases: set[Lease] = field(default_factory=set)


class SlotPool:
    """Lends the slots of ``classes``; who finds a class empty waits.

    Threading: every method may be called from any thread.
    Lifetime: keeps the arena alive; ``close`` gives the slots back to it.

    Raises:
        MemoryError: the arena does not hold all slots.
    """

    def __init__(self, arena: PinnedArena, classes: Mapping[str, SizeClass]) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._classes: dict[str, _Class] = {}
        try:
            for name, size in classes.items():
                slots = [arena.allocate(size.nbytes, label=name) for _ in range(size.count)]
                self._classes[name] = _Class(size, free=slots)
        except MemoryError:
            self.close()
            raise

    def lease(self, class_name: str, *, label: str = "", timeout_s: float | None = None) -> Lease:
        """Returns a lease of a free slot of the class, waiting until there is one.

        Args:
            class_name: one of the classes given at construction.
            label: what the slot is for, shown when somebody waits in vain; default the class's name.
            timeout_s: the longest wait; default no limit.

        Raises:
            KeyError: no such class.
            RunError: the wait cannot end, as all slots are leased by this very thread and none is on its way back; or
                it took longer than ``timeout_s``. Lists the holders.
        """
        wanted = self._classes[class_name]
        began = time.monotonic()
        slow = began + _SLOW_WAIT_S
        while True:
            # Read before looking, so that what comes back in between ends the pause below at once.
            epoch = self._arena.epoch
            with self._lock:
                _reap(wanted)
                if wanted.free:
                    lease = Lease(self, wanted.free.pop(), class_name, label)
                    wanted.leases.add(lease)
                    return lease
                self._check_wait_can_end(class_name, wanted)
                pause = _pause(wanted)
            now = time.monotonic()
            if timeout_s is not None and now - began >= timeout_s:
                raise RunError(f"no slot came back within {timeout_s} s: {self._describe(class_name)}")
            if now >= slow:
                _log.warning("still waiting after %.0f s: %s", now - began, self._describe(class_name))
                slow = now + 2 * (now - began)
            if timeout_s is not None:
                pause = min(pause, max(timeout_s - (now - began), 0.0))
            with trace.span(trace.WAIT, "for a slot of", class_name):
                self._arena.wait_epoch(epoch, pause)

    def free_count(self, class_name: str) -> int:
        """Returns how many slots of the class can be leased without waiting."""
        wanted = self._classes[class_name]
        with self._lock:
            _reap(wanted)
            return len(wanted.free)

    def leased_bytes(self) -> dict[str, int]:
        """Returns the bytes of each class that are leased or still being read."""
        with self._lock:
            return {
                name: owned.size.nbytes * (len(owned.leases) + len(owned.draining))
                for name, owned in self._classes.items()
            }

    @property
    def classes(self) -> dict[str, SizeClass]:
        return {name: owned.size for name, owned in self._classes.items()}

    def take_back(self, lease: Lease, slot: Slot, pending: list[Pending]) -> None:
        """Receives a released lease's slot; called by ``Lease.release``."""
        owned = self._classes[lease.class_name]
        with self._lock:
            owned.leases.discard(lease)
            owned.draining.append(_Draining(slot, pending))
        self._arena.advance_epoch()

    def close(self, timeout_s: float = 30.0) -> None:
        """Gives all slots back to the arena, after waiting for readers and pending work of released ones.

        Raises:
            RunError: slots are still leased, or readers did not leave within ``timeout_s``. Nothing is given back then.
        """
        deadline = time.monotonic() + timeout_s
        for name, owned in self._classes.items():
            if owned.leases:
                raise RunError(f"cannot close the pool: {self._describe(name)}")
            for drained in owned.draining:
                _finish(drained)
                if not drained.slot.wait_no_readers(max(deadline - time.monotonic(), 0.0)):
                    raise RunError(f"cannot close the pool: {self._describe(name)}")
        for owned in self._classes.values():
            for slot in [*owned.free, *(drained.slot for drained in owned.draining)]:
                slot.release()
        self._classes.clear()

    def _check_wait_can_end(self, class_name: str, wanted: _Class) -> None:
        me = threading.get_ident()
        if not wanted.draining and all(lease.thread_id == me for lease in wanted.leases):
            raise RunError(
                f"waiting for a slot would never end, this thread holds them all: {self._describe(class_name)}; "
                "release a lease first or give the class more slots"
            )

    def _describe(self, class_name: str) -> str:
        owned = self._classes[class_name]
        now = time.monotonic()
        held = [f"'{lease.label}' for {now - lease.since:.1f} s" for lease in tuple(owned.leases)]
        drains = [f"one with {drained.slot.readers} reader(s)" for drained in tuple(owned.draining)]
        return (
            f"class '{class_name}' has {owned.size.count} slot(s) of {owned.size.nbytes:,} bytes, "
            f"{len(held)} leased ({', '.join(held) or 'none'}), "
            f"{len(drains)} on the way back ({', '.join(drains) or 'none'})"
        )


def _reap(owned: _Class) -> None:
    """Moves slots that nobody touches any more to the free ones; passes on the failure of their pending work."""
    for _ in range(len(owned.draining)):
        drained = owned.draining.popleft()
        if not drained.idle():
            owned.draining.append(drained)
            continue
        owned.free.append(drained.slot)
        _finish(drained)


def _finish(drained: _Draining) -> None:
    for work in drained.pending:
        work.wait()


def _pause(wanted: _Class) -> float:
    waits_for_work = any(not work.done() for drained in wanted.draining for work in drained.pending)
    return _TICKET_POLL_S if waits_for_work else _LONGEST_PAUSE_S
