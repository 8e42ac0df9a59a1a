# SPDX-License-Identifier: Apache-2.0
"""The only owner of pinned memory. The lender is ``memory.pool``; the code is native (``PinnedArena`` in native/)."""

from __future__ import annotations

from dataclasses import dataclass

from memascend_jax._native import _core
from memascend_jax._native._core import Slot, page_bytes
from memascend_jax.memory.huge_pages import huge_page_bytes
from memascend_jax.memory.meter import available_memory_bytes
from memascend_jax.units import format_bytes

__all__ = ["ArenaStatistics", "PinnedArena", "Refusal", "Slot", "page_bytes"]

_RUNGS = ("device", "mlock", "pageable")
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rung of the pinning ladder that ``nbytes`` of an arena did not reach."""

    rung: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """The state of an arena at one moment, in bytes.

    Attributes:
        in_use_bytes: in slots; high_water_bytes: the most so far.
        largest_free_bytes: the largest slot that could be taken.
        huge_bytes: resident in huge pages; None where the kernel does not tell.
        rung_bytes: how firmly memory is held: ``device``, ``mlock`` and ``pageable`` add up to the capacity.
        registered_by: who registered regions with a device.
        refusals: what was tried in vain.
    """

    capacity_bytes: int
    in_use_bytes: int
    high_water_bytes: int
    largest_free_bytes: int
    huge_bytes: int | None
    rung_bytes: dict[str, int]
    registered_by: tuple[str, ...]
    refusals: tuple[Refusal, ...]

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that the largest free piece does not hold."""
        free = self.capacity_bytes - self.in_use_bytes
        return 1.0 - self.largest_free_bytes / free if free else 0.0


class PinnedArena(_core.PinnedArena):
    """Owns page-aligned host memory of exactly the size asked for, held in place as firmly as the machine allows.

    One anonymous mapping in huge pages, from which slots are taken by best fit. Nothing is rounded up but to whole
    pages. Pinning climbs a ladder region by region, and what one refuses costs that region alone: registered with a
    device (copies go by DMA), locked in memory, pageable. The rung reached is told by ``statistics`` and ``describe``.

    Args:
        capacity_bytes: size of the mapping, rounded up to pages.
        pin: ``auto`` locks what may be locked; ``device`` registers with the CUDA driver first; ``mlock`` raises when
            refused; ``none`` does not try.
        huge_pages: advise the kernel to use huge pages.
        lockable_bytes: the most that is locked; default what the machine and its cgroups have room for now.
        region_bytes: what is registered as one piece, whole pages, at most 1 GiB.
        page_bytes: what sizes are rounded to, a power of two; 0 is the system's page.
        cuda_ordinal: which visible CUDA device ``pin="device"`` registers with.

    Raises:
        OSError: the memory cannot be mapped, or with ``pin="mlock"`` not be locked.
        ValueError: an argument is out of its range.

    Threading: every method may be called from any thread.
    Lifetime: slots, their views and their exports keep the memory mapped; a registration with the CUDA driver ends
    just before the memory is unmapped.

    Example:
        >>> arena = PinnedArena(1 << 20)
        >>> slot = arena.allocate(4096, "weights")
        >>> slot.view(0, 4096)[:] = 0
        >>> slot.release()
        >>> arena.close()
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: str = "auto",
        huge_pages: bool = True,
        lockable_bytes: int | None = None,
        region_bytes: int = _core.REGION_BYTES,
        page_bytes: int = 0,
        cuda_ordinal: int = 0,
    ) -> None:
        if lockable_bytes is None and pin in ("auto", "device"):
            lockable_bytes = available_memory_bytes()
        super().__init__(
            capacity_bytes,
            pin=pin,
            huge_pages=huge_pages,
            lockable_bytes=lockable_bytes,
            region_bytes=region_bytes,
            page_bytes=page_bytes,
            cuda_ordinal=cuda_ordinal,
        )

    def statistics(self) -> ArenaStatistics:
        """Returns how the arena is used and held now; takes milliseconds, as the kernel is asked for huge pages."""
        regions = self.pinned_regions()
        rung_bytes = dict.fromkeys(_RUNGS, 0)
        refused: dict[tuple[str, str], int] = {}
        for region in regions:
            locked = 0 if region["rung"] == "device" else region["locked_bytes"]
            held = region["nbytes"] if region["rung"] == "device" else 0
            rung_bytes["device"] += held
            rung_bytes["mlock"] += locked
            rung_bytes["pageable"] += region["nbytes"] - held - locked
            for rung, nbytes, reason in region["refusals"]:
                refused[rung, reason] = refused.get((rung, reason), 0) + nbytes
        return ArenaStatistics(
            capacity_bytes=self.capacity_bytes,
            in_use_bytes=self.in_use_bytes,
            high_water_bytes=self.high_water_bytes,
            largest_free_bytes=self.largest_free_bytes,
            huge_bytes=huge_page_bytes(regions[0]["address"], self.capacity_bytes) if regions else 0,
            rung_bytes=rung_bytes,
            registered_by=tuple(sorted({r["registered_by"] for r in regions if r["registered_by"]})),
            refusals=tuple(Refusal(rung, nbytes, reason) for (rung, reason), nbytes in refused.items()),
        )

    def describe(self) -> str:
        """Returns one line for a screen: the size, its huge pages, the rung reached, and why not a higher one.

        >>> PinnedArena(1 << 20, pin="none").describe()
        'arena: 1.00 MiB, pageable (not asked for)'
        """
        found = self.statistics()
        parts = [f"arena: {format_bytes(found.capacity_bytes)}", *_huge_pages(found), _rungs(found)]
        reason = f" ({self.pinning_reason})" if self.pinning_reason else ""
        return ", ".join(parts) + reason


def _huge_pages(found: ArenaStatistics) -> list[str]:
    """Nothing is said of memory that was not touched yet, nor of less than a huge page."""
    whole = found.capacity_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    pinned = found.rung_bytes["pageable"] == 0
    if not whole or found.huge_bytes is None or (not pinned and not found.huge_bytes):
        return []
    if found.huge_bytes >= whole:
        return ["huge pages"]
    return [f"{format_bytes(found.huge_bytes)} of it in huge pages" if found.huge_bytes else "no huge pages"]


def _rungs(found: ArenaStatistics) -> str:
    words = {"device": f"registered by {' and '.join(found.registered_by)}"}
    reached = {rung: nbytes for rung, nbytes in found.rung_bytes.items() if nbytes}
    if len(reached) == 1:
        return "".join(words.get(rung, rung) for rung in reached)
    return ", ".join(f"{format_bytes(nbytes)} {words.get(rung, rung)}" for rung, nbytes in reached.items())
