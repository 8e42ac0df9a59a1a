# SPDX-License-Identifier: Apache-2.0
"""What became of a source's examples: their outcome, their place in the split, and where their tokens are."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.data.examples import ExampleBuilder


class Outcome(IntEnum):
    """What became of an example."""

    KEPT = 0
    CUT = 1
    DROPPED = 2
    EMPTY = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Examples by outcome, and the tokens of those that are used.

    ``tokens_cut`` were cut off; ``wrong`` records were skipped.
    """

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    empty: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_cut: int = 0
    wrong: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Returns the counts of both."""
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Question:
    """The messages before an answer, the answer the data gives, and the tools that a template may show."""

    messages: tuple[dict[str, Any], ...]
    answer: str
    tools: list[Any] | None = None


@dataclass(slots=True)
class Collection:
    """All examples of a source, by their order: rank in the split, outcome, and where their tokens are.

    An example that was cut into several pieces has several numbers in the builder, from ``first`` on.
    """

    builder: ExampleBuilder
    ranks: array[int] = field(default_factory=lambda: array("Q"))
    outcomes: array[int] = field(default_factory=lambda: array("B"))
    first: array[int] = field(default_factory=lambda: array("i"))
    pieces: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    trained: array[int] = field(default_factory=lambda: array("q"))
    tokens_cut: array[int] = field(default_factory=lambda: array("q"))
    questions: list[tuple[int, Question]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    with_special_text: int = 0
    answers_not_found: int = 0
    wrong: int = 0

    def numbers(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """Returns the numbers in the builder of the chosen examples' pieces."""
        indices = np.flatnonzero(chosen)
        return [self.first[i] + piece for i in indices for piece in range(self.pieces[i])]

    def counts(self, chosen: npt.NDArray[np.bool_]) -> Counts:
        """Returns what became of the chosen examples."""
        outcomes = np.array(self.outcomes, np.uint8)[chosen]
        by_outcome = {outcome.name.lower(): int((outcomes == outcome).sum()) for outcome in Outcome}
        return Counts(
            **by_outcome,
            tokens=int(np.array(self.tokens, np.int64)[chosen].sum()),
            trained_tokens=int(np.array(self.trained, np.int64)[chosen].sum()),
            tokens_cut=int(np.array(self.tokens_cut, np.int64)[chosen].sum()),
        )

    def held_out(self, fraction: float) -> npt.NDArray[np.bool_]:
        """Returns which examples are held out: those with the smallest ranks, equal examples on one side."""
        ranks = np.array(self.ranks, np.uint64)
        distinct = np.unique(ranks)
        count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
        if fraction == 0 or count < 1:
            return np.zeros(len(ranks), np.bool_)
        chosen: npt.NDArray[np.bool_] = ranks <= distinct[count - 1]
        return chosen


def rank_below(fraction: float) -> int:
    """Returns the number below which a ``fraction`` of all ranks is, 0 to 1; ranks have 64 bits."""
    return round(fraction * 2**64)
