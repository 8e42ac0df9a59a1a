# SPDX-License-Identifier: Apache-2.0
"""A plan of host memory: every consumer with its bytes, held against a budget before anything is loaded. Pure.

Who consumes what is known by the callers (``training.plan_memory``); here is the accounting and the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memascend_jax.errors import BudgetError
from memascend_jax.units import format_bytes


@dataclass(frozen=True, slots=True)
class Consumer:
    """Something that is resident in host memory.

    Attributes:
        category: ``runtime`` | ``arena`` | ``device`` (which on a CPU backend is host memory) | ``data``.
        what: the words for a table.
        nbytes: its largest size during the run.
        how: how the figure comes about, such as ``4 slots x 3.38 MiB``.
    """

    category: str
    what: str
    nbytes: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The consumers of one run and the budget they must keep; ``apart`` are those in a device's own memory."""

    consumers: tuple[Consumer, ...]
    budget_bytes: int
    apart: tuple[Consumer, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(consumer.nbytes for consumer in self.consumers)

    def category_bytes(self, category: str) -> int:
        """Returns the bytes of one category."""
        return sum(consumer.nbytes for consumer in self.consumers if consumer.category == category)

    @property
    def apart_bytes(self) -> int:
        return sum(consumer.nbytes for consumer in self.apart)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes


def choose_plan(candidates: Iterable[MemoryPlan], options: Callable[[], Iterable[str]]) -> int:
    """Returns the index of the first candidate that fits its budget; candidates are ordered fast to small.

    Those behind it are not asked for.

    Raises:
        BudgetError: none fits; names the smallest, its largest consumers and the ``options`` that would help.
    """
    refused: list[MemoryPlan] = []
    for plan in candidates:
        if plan.fits:
            return len(refused)
        refused.append(plan)
    smallest = min(refused, key=lambda plan: plan.total_bytes)
    largest = sorted(smallest.consumers, key=lambda consumer: -consumer.nbytes)[:4]
    listed = ", ".join(f"{consumer.what} {format_bytes(consumer.nbytes)}" for consumer in largest)
    raise BudgetError(
        f"the run needs at least {format_bytes(smallest.total_bytes)} of host memory, but the budget is "
        f"{format_bytes(smallest.budget_bytes)}. The largest parts are: {listed}. "
        f"What would help: {'; '.join(options())}."
    )
