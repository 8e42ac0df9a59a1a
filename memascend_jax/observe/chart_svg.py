# SPDX-License-Identifier: Apache-2.0
"""Draws a chart as SVG: plain shapes and text, no script, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from memascend_jax.observe.charts import COLOURS, MARK_COLOUR, Chart, tick_text, ticks

WIDTH, HEIGHT = 880, 330
_LEFT, _RIGHT, _BOTTOM, _LINE = 64, 20, 44, 17
#: Mean width of a character of the legend, in pixels, on the wide side.
_CHARACTER = 6.6

Scale = Callable[[float], float]

STYLE = """\
svg text { font: 12px system-ui, sans-serif; fill: var(--ink, #222); }
svg .title { font-size: 15px; font-weight: 600; }
svg .quiet { fill: var(--quiet, #666); }
svg .grid { stroke: var(--grid, #e2e2e2); stroke-width: 1; }
svg .axis { stroke: var(--quiet, #666); stroke-width: 1; }
"""


def chart_svg(chart: Chart) -> str:
    """Returns ``chart`` as an ``<svg>`` element; ``STYLE`` must be in the page."""
    legend = list(_legend(chart))
    top = 30 + (_LINE if chart.note else 0) + _LINE * (1 + max((row for row, *_ in legend), default=0)) + 8
    height = HEIGHT + top - 60
    (x_low, x_high), (y_low, y_high) = chart.x_range, chart.y_range
    x = _scale(x_low, x_high, _LEFT, WIDTH - _RIGHT)
    y = _scale(y_low, y_high, height - _BOTTOM, top)
    shapes = {"areas": _areas, "bars": _bars, "lines": _lines}[chart.kind]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="0" y="16">{escape(chart.title)}</text>',
        *([f'<text class="quiet" x="0" y="{16 + _LINE}">{escape(chart.note)}</text>'] if chart.note else []),
        *_legend_shapes(legend, top - 8),
        *_axes(chart, x, y, height),
        *shapes(chart, x, y),
        *_marks(chart, y),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(low: float, high: float, begin: float, end: float) -> Scale:
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _legend(chart: Chart) -> Iterator[tuple[int, float, str, str]]:
    """Yields (row, x, name, colour) of each series, as many in a row as fit."""
    row, x = 0, 0.0
    for series, colour in zip(chart.series, _colours(chart), strict=True):
        width = 30 + _CHARACTER * len(series.name)
        if x > 0 and x + width > WIDTH:
            row, x = row + 1, 0.0
        yield row, x, series.name, colour
        x += width


def _legend_shapes(legend: Sequence[tuple[int, float, str, str]], bottom: float) -> Iterator[str]:
    rows = max((row for row, *_ in legend), default=0)
    for row, x, name, colour in legend:
        y = bottom - (rows - row) * _LINE - 4
        yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 16:.1f}" y="{y:.1f}">{escape(name)}</text>'


def _axes(chart: Chart, x: Scale, y: Scale, height: float) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, height - _BOTTOM
    values = ticks(*chart.y_range, most=5)
    for value in values:
        at = y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        text = tick_text(value, _step(values))
        yield f'<text class="quiet" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    whole = chart.x_label == "step"
    places = [value for value in ticks(*chart.x_range, most=9) if not whole or value == int(value)]
    for value in places:
        at = x(value)
        yield f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        text = tick_text(value, 1.0 if whole else _step(places))
        yield f'<text class="quiet" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + right) / 2
    yield (
        f'<text class="quiet" x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    centre = y(sum(chart.y_range) / 2)
    yield (
        f'<text class="quiet" transform="translate(12 {centre:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )


def _areas(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for series, colour, (lower, upper) in zip(chart.series, _colours(chart), chart.stacked(), strict=True):
        there = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(series.x, upper, strict=True)]
        back = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(series.x, lower, strict=True)]
        highest = max(series.y)
        yield (
            f'<polygon points="{" ".join(there + back[::-1])}" fill="{colour}" fill-opacity="0.85">'
            f"<title>{escape(series.name)}: at most {highest:,.4g} {escape(chart.y_label)}</title></polygon>"
        )


def _bars(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    width = chart.bar_width * 0.8
    for series, colour, (lower, upper) in zip(chart.series, _colours(chart), chart.stacked(), strict=True):
        for at, below, above, value in zip(series.x, lower, upper, series.y, strict=True):
            left, right = x(at - width / 2), x(at + width / 2)
            yield (
                f'<rect x="{left:.1f}" y="{y(above):.1f}" width="{right - left:.1f}" '
                f'height="{max(y(below) - y(above), 0):.2f}" fill="{colour}">'
                f"<title>{escape(chart.x_label)} {at:,.4g}: {escape(series.name)} {value:,.4g} "
                f"{escape(chart.y_label)}</title></rect>"
            )


def _lines(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for series, colour in zip(chart.series, _colours(chart), strict=True):
        points = [(x(a), y(b)) for a, b in zip(series.x, series.y, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        if series.points or len(points) == 1:
            for (a, b), at, value in zip(points, series.x, series.y, strict=True):
                yield (
                    f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}">'
                    f"<title>{escape(chart.x_label)} {at:,.4g}: {value:,.5g}</title></circle>"
                )


def _marks(chart: Chart, y: Scale) -> Iterator[str]:
    right = WIDTH - _RIGHT
    taken: list[float] = []
    for words, value in sorted(chart.marks, key=lambda mark: -mark[1]):
        at = y(value)
        yield (
            f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{MARK_COLOUR}" '
            'stroke-width="1.5" stroke-dasharray="6 4"/>'
        )
        # Words of lines close to each other would cover one another: the lower ones go below.
        text_y = at - 5
        while any(abs(text_y - other) < _LINE - 3 for other in taken):
            text_y += _LINE
        taken.append(text_y)
        yield (
            f'<text x="{right - 4}" y="{text_y:.1f}" text-anchor="end" style="fill:{MARK_COLOUR}">'
            f"{escape(words)}</text>"
        )


def _colours(chart: Chart) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(chart.series))]


def _step(values: Sequence[float]) -> float:
    return values[1] - values[0] if len(values) > 1 else 1.0
