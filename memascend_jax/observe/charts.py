# SPDX-License-Identifier: Apache-2.0
"""What a figure shows, apart from how it is drawn: ``run_charts`` makes charts, ``chart_svg``, ``chart_png`` draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

#: The first eight are told apart by people of every colour vision. Source: Okabe and Ito, Color Universal Design.
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#8c8c8c",
    "#5b4b8a",
    "#8b5a2b",
    "#7fc97f",
    "#444444",
)
MARK_COLOUR = "#b00020"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, as many ``y`` as ``x``; in a chart of areas or bars all series have the same ``x``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure.

    Attributes:
        kind: ``lines``; ``areas`` and ``bars`` are stacked, the first series at the bottom.
        marks: (words, value) of horizontal lines.
        note: a sentence below the title.
    """

    title: str
    kind: Literal["lines", "areas", "bars"]
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[str, float]] = ()
    note: str = ""

    @property
    def x_range(self) -> tuple[float, float]:
        """The first and last x; bars take half a step more on each side."""
        xs = [x for series in self.series for x in series.x]
        low, high = min(xs), max(xs)
        if self.kind == "bars":
            half = self.bar_width / 2
            return low - half, high + half
        return (low, high) if high > low else (low - 0.5, high + 0.5)

    @property
    def y_range(self) -> tuple[float, float]:
        """The values shown: from 0 for what is stacked or begins near it, with room above the highest."""
        stacked = self.kind != "lines"
        values = [sum(column) for column in zip(*(s.y for s in self.series), strict=True)] if stacked else []
        values += [y for series in self.series for y in series.y] + [value for _, value in self.marks]
        low, high = min(values, default=0.0), max(values, default=1.0)
        bottom = 0.0 if stacked or low < 0.4 * high else low - 0.08 * (high - low)
        return bottom, (high + 0.06 * (high - bottom) if high > bottom else bottom + 1.0)

    @property
    def bar_width(self) -> float:
        """The distance between bars."""
        xs = self.series[0].x
        return min((b - a for a, b in pairwise(xs)), default=1.0)

    def stacked(self) -> list[tuple[list[float], list[float]]]:
        """Returns lower and upper edge of each series when they are put on each other."""
        edges: list[tuple[list[float], list[float]]] = []
        lower = [0.0] * len(self.series[0].x)
        for series in self.series:
            upper = [below + y for below, y in zip(lower, series.y, strict=True)]
            edges.append((lower, upper))
            lower = upper
        return edges


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round numbers within [low, high], at most ``most`` + 1 and 1, 2 or 5 of a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Returns ``value`` with the digits that ticks ``step`` apart need."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
