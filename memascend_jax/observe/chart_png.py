# SPDX-License-Identifier: Apache-2.0
"""Draws charts as one PNG with matplotlib, which is an extra: ``pip install 'memascend-jax[report]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memascend_jax.observe.charts import COLOURS, MARK_COLOUR, Chart


def has_matplotlib() -> bool:
    """Returns whether PNGs can be drawn here."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_png(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Writes ``charts``, two in a row, to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    # Not pyplot: that looks for a display and keeps every figure.
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(8 * columns, 4.4 * rows + 0.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    for index, chart in enumerate(charts, start=1):
        _draw(chart, figure.add_subplot(rows, columns, index))
    figure.savefig(path, format="png")


def _draw(chart: Chart, axes: Any) -> None:
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(chart.series))]
    edges = chart.stacked() if chart.kind != "lines" else []
    for index, (series, colour) in enumerate(zip(chart.series, colours, strict=True)):
        if chart.kind == "lines":
            marker = "o" if series.points or len(series.x) == 1 else None
            axes.plot(series.x, series.y, color=colour, label=series.name, marker=marker, linewidth=1.5)
        elif chart.kind == "areas":
            axes.fill_between(
                series.x, *edges[index], color=colour, label=series.name, alpha=0.85, linewidth=0
            )
        else:
            lower = edges[index][0]
            axes.bar(series.x, series.y, chart.bar_width * 0.8, bottom=lower, color=colour, label=series.name)
    for words, value in chart.marks:
        axes.axhline(value, color=MARK_COLOUR, linestyle="--", linewidth=1.2, label=words)
    axes.xaxis.get_major_locator().set_params(integer=chart.x_label == "step")
    axes.set_xlim(*chart.x_range)
    axes.set_ylim(*chart.y_range)
    axes.set_title(chart.title + (f"\n{chart.note}" if chart.note else ""), fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
