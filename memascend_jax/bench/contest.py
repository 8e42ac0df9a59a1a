# SPDX-License-Identifier: Apache-2.0
"""Contenders that do the same work in turns, so that a disk that drifts is as unfair to one as to the other.

The order in a round is drawn anew each time: in a fixed or rotating one the same contender would always come after the
same other, whose caches and writes it would find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from memascend_jax.bench.sample import Sample, Series, paired_ratio
from memascend_jax.bench.tensor_set import TensorSet
from memascend_jax.errors import MemascendError

Kind = Literal["write", "read", "mixed", "durable write", "rows"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROWS = 4096
ROW_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work on one set of tensors. ``write``: done when the disk took it; ``durable write``: flushed too."""

    kind: Kind
    tensors: TensorSet

    @property
    def nbytes(self) -> int:
        """What one measurement moves."""
        if self.kind == "rows":
            return ROWS * ROW_BYTES
        return self.tensors.nbytes * (2 if self.kind == "mixed" else 1)

    def __str__(self) -> str:
        if self.kind == "rows":
            return f"{ROWS:,} random rows of {ROW_BYTES:,} bytes, {self.tensors.label}"
        return f"{self.kind}, {self.tensors.label}"


class Contender(Protocol):
    """Somebody who can do some of the cases.

    ``measure`` leaves nothing for the disk to do: what was written is made durable after the clock has stopped, or
    the next contender would wait for it.
    """

    name: str

    def takes(self, case: Case) -> bool: ...
    def note(self, case: Case) -> str: ...
    def measure(self, case: Case) -> Sample: ...


def compete(
    contenders: Sequence[Contender], cases: Sequence[Case], rounds: int, say: Callable[[str], None]
) -> list[Series]:
    """Returns the series of every contender in every case it takes: in each round all of them, one after the other.

    A contender that fails is left out of the case from then on; its error is kept. ``say`` is told the outcome of
    each case as soon as it is there, so that what is broken off has not been in vain.
    """
    found: list[Series] = []
    for case in cases:
        entered = [contender for contender in contenders if contender.takes(case)]
        series = [
            Series(contender.name, str(case), case.nbytes, note=contender.note(case)) for contender in entered
        ]
        say(str(case))
        _compete_in(case, list(zip(entered, series, strict=True)), rounds)
        for one in series:
            say(f"  {_outcome(one, series[0])}")
        found += series
    return found


def _compete_in(case: Case, entered: Sequence[tuple[Contender, Series]], rounds: int) -> None:
    """Measures one case; the first round warms up."""
    draw = random.Random(0)
    for turn in range(rounds + 1):
        for contender, one in draw.sample(entered, len(entered)):
            if one.error:
                continue
            try:
                sample = contender.measure(case)
            except (OSError, MemascendError, ValueError, RuntimeError) as error:
                one.error = f"{type(error).__name__}: {error}"
                continue
            if turn > 0:
                one.samples.append(sample)


def _outcome(one: Series, first: Series) -> str:
    """Returns a line about ``one`` and how fast ``first`` was beside it."""
    facts = one.to_json()
    if "error" in facts:
        return f"{one.contender}: failed: {facts['error']}"
    speed, spread = facts["median"] / 1e9, facts["mad"] / 1e9
    text = f"{one.contender}: {speed:.2f} GB/s ± {spread:.2f}, {facts['cpu_s_per_gib']:.3f} s of processor per GiB"
    ratio = paired_ratio(first, one)
    return text if one is first or ratio is None else f"{text}; {first.contender}: {ratio:.2f} times as fast"
