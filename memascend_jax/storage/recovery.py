# SPDX-License-Identifier: Apache-2.0
"""Which generation a store is in, from the catalog slots of all its members. Pure.

A commit writes generation n + 1 to slot (n + 1) mod 2 of every member after all its data is on disk, so the
highest valid generation wins, even when only one member holds it. What a generation refers to may be overwritten
only after the next one was committed. So when the slot that would hold a later generation is unreadable, the
best one left is *untrusted*: it is right only if every checksum in it still matches its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memascend_jax.errors import StoreError
from memascend_jax.storage.catalog import Catalog
from memascend_jax.storage.store_errors import DamagedStoreError


@dataclass(frozen=True, slots=True)
class Slot:
    """What one catalog slot of one member holds; neither a catalog nor blank means damaged."""

    member: int
    slot: int
    catalog: Catalog | None
    blank: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The generation to open. ``stale``: (member, slot) places that must be rewritten with it."""

    catalog: Catalog
    trusted: bool
    stale: tuple[tuple[int, int], ...]


def choose_generation(slots: Sequence[Slot], path: str) -> Choice:
    """Returns the newest generation that any member holds.

    Raises:
        StoreError: no slot holds a generation, or two members disagree about one.
    """
    found = [slot.catalog for slot in slots if slot.catalog is not None]
    if not found:
        raise DamagedStoreError(
            f"cannot open '{path}': none of its {len(slots)} catalog copies is readable; the store is lost; "
            f"remove it (memascend store wipe, with the paths of all its members) and start again"
        )
    best = max(found, key=lambda catalog: catalog.generation)
    if any(other.generation == best.generation and other.identity != best.identity for other in found):
        raise StoreError(
            f"cannot open '{path}': its members hold different catalogs of generation {best.generation:,}; they "
            "were written apart from each other"
        )
    home = best.generation % 2
    trusted = all(_is_predecessor(slot, best) for slot in slots if slot.slot != home)
    stale = [
        (slot.member, slot.slot)
        for slot in slots
        if (slot.slot == home and not _holds(slot, best.generation))
        or (slot.slot != home and not _is_predecessor(slot, best))
    ]
    return Choice(best, trusted, tuple(stale))


def _holds(slot: Slot, generation: int) -> bool:
    return slot.catalog is not None and slot.catalog.generation == generation


def _is_predecessor(slot: Slot, best: Catalog) -> bool:
    """Whether the slot that the next commit would write shows that it never was: it holds the generation
    before, a copy of this one (left by a repair), or nothing yet in a new store."""
    if slot.blank:
        return best.generation == 0
    return _holds(slot, best.generation - 1) or _holds(slot, best.generation)
