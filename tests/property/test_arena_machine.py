# SPDX-License-Identifier: Apache-2.0
"""Any sequence of allocations, releases and readers keeps the arena's promises; the model is a list of intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from memascend_jax.memory.arena import PinnedArena, Slot
from memascend_jax.units import round_up

pytestmark = pytest.mark.property

PAGE = 4096
CAPACITY = 32 * PAGE


class ArenaMachine(RuleBasedStateMachine):
    slots = Bundle("slots")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.arena = PinnedArena(CAPACITY, pin="none")
        self.base = self.arena.regions()[0][0]
        self.live: dict[int, tuple[Slot, int]] = {}  # by address, with the byte it is filled with
        self.high_water = 0
        self.mark = 0

    @rule(target=slots, nbytes=st.integers(1, CAPACITY + 1))
    def allocate(self, nbytes: int) -> Slot | None:
        fits = round_up(nbytes, PAGE) <= self.arena.largest_free_bytes
        try:
            slot = self.arena.allocate(nbytes, "s")
        except MemoryError:
            assert not fits
            return None
        assert fits
        self.mark = self.mark % 255 + 1
        slot.view(0, nbytes)[:] = self.mark
        self.live[slot.address] = (slot, self.mark)
        self.high_water = max(self.high_water, self.arena.in_use_bytes)
        return slot

    @rule(target=readers, slot=slots)
    def read(self, slot: Slot | None) -> list[np.ndarray]:
        if slot is None or slot.released:
            return []
        return [np.from_dlpack(slot.dlpack("uint8", (slot.nbytes,)))]

    @rule(reader=consumes(readers))
    def stop_reading(self, reader: list[np.ndarray]) -> None:
        reader.clear()

    @rule(slot=slots)
    def release(self, slot: Slot | None) -> None:
        if slot is None:
            return
        if not slot.released and slot.readers > 0:
            with pytest.raises(RuntimeError, match="reader"):
                slot.release()
            return
        if not slot.released:
            del self.live[slot.address]
        slot.release()
        assert slot.released

    @invariant()
    def slots_are_aligned_inside_and_apart(self) -> None:
        end = self.base
        for address in sorted(self.live):
            assert (address - self.base) % PAGE == 0
            assert address >= end
            end = address + self.live[address][0].nbytes
        assert end <= self.base + CAPACITY

    @invariant()
    def every_slot_keeps_its_bytes(self) -> None:
        for slot, mark in self.live.values():
            view = slot.view(0, slot.nbytes)
            assert view[0] == view[-1] == mark

    @invariant()
    def the_figures_add_up(self) -> None:
        used = sum(round_up(slot.nbytes, PAGE) for slot, _ in self.live.values())
        assert self.arena.in_use_bytes == used
        assert self.arena.high_water_bytes == self.high_water
        assert self.arena.largest_free_bytes == self._longest_gap()

    def _longest_gap(self) -> int:
        longest, end = 0, self.base
        for address in sorted(self.live):
            longest = max(longest, address - end)
            end = address + round_up(self.live[address][0].nbytes, PAGE)
        return max(longest, self.base + CAPACITY - end)


TestArena = ArenaMachine.TestCase
