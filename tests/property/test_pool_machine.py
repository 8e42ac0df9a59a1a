# SPDX-License-Identifier: Apache-2.0
"""Any sequence of leases, readers, pending work and releases: no slot is lent twice, none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from memascend_jax.errors import RunError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import Lease, SizeClass, SlotPool

pytestmark = pytest.mark.property

PAGE = 4096
CLASSES = {"a": SizeClass(PAGE, 3), "b": SizeClass(100, 1)}


class Work:
    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        assert self.ended


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    readers = Bundle("readers")
    work = Bundle("work")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(PinnedArena(4 * PAGE, pin="none"), CLASSES)
        self.held: dict[int, str] = {}  # address -> class, of what is leased
        self.busy: list[tuple[int, str, object]] = []  # what keeps an address from being lent

    def _blocked(self, class_name: str) -> set[int]:
        return {
            address
            for address, name, why in self.busy
            if name == class_name and (bool(why) if isinstance(why, list) else not why.ended)  # type: ignore[attr-defined]
        }

    @rule(target=leases, class_name=st.sampled_from(sorted(CLASSES)))
    def lease(self, class_name: str) -> Lease | None:
        held = {address for address, name in self.held.items() if name == class_name}
        room = CLASSES[class_name].count - len(held | self._blocked(class_name))
        if room <= 0:
            with pytest.raises(RunError):
                self.pool.lease(class_name, timeout_s=0.0)
            return None
        lease = self.pool.lease(class_name, timeout_s=0.0)
        assert lease.address not in self.held
        assert lease.address not in self._blocked(class_name)
        self.held[lease.address] = class_name
        return lease

    @rule(target=readers, lease=leases)
    def read(self, lease: Lease | None) -> list[np.ndarray]:
        if lease is None or lease._slot is None:
            return []
        box = [np.from_dlpack(lease.export("uint8", (lease.nbytes,)))]
        self.busy.append((lease.address, lease.class_name, box))
        return box

    @rule(box=consumes(readers))
    def stop_reading(self, box: list[np.ndarray]) -> None:
        box.clear()

    @rule(target=work, lease=leases)
    def defer(self, lease: Lease | None) -> Work:
        pending = Work()
        if lease is not None and lease._slot is not None:
            lease.defer(pending)
            self.busy.append((lease.address, lease.class_name, pending))
        return pending

    @rule(pending=consumes(work))
    def end_work(self, pending: Work) -> None:
        pending.ended = True

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        if lease._slot is not None:
            del self.held[lease.address]
        lease.release()

    @invariant()
    def free_slots_are_those_nobody_holds_or_touches(self) -> None:
        for name, size in CLASSES.items():
            held = {address for address, owner in self.held.items() if owner == name}
            assert self.pool.free_count(name) == size.count - len(held | self._blocked(name))


TestPool = PoolMachine.TestCase
