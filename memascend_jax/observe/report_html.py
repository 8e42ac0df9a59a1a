# SPDX-License-Identifier: Apache-2.0
"""One page on a run: its figures and tables in a single file that needs nothing else, scripts and network included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from memascend_jax.observe.chart_svg import STYLE, chart_svg
from memascend_jax.observe.charts import Chart

Row = Sequence[str]

_PAGE_STYLE = """\
:root { --ink: #222; --quiet: #666; --grid: #e2e2e2; --page: #fff; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --quiet: #a0a0a0; --grid: #3a3a3a; --page: #161616; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 920px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 20px; margin-bottom: 0; } h2 { font-size: 15px; margin: 1.6em 0 0.4em; }
.quiet { color: var(--quiet); } table { border-collapse: collapse; }
td, th { padding: 2px 18px 2px 0; text-align: left; vertical-align: top; font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 1px solid var(--grid); } svg { width: 100%; height: auto; margin: 1.2em 0; }
"""


def report_page(
    title: str,
    status: str,
    facts: Sequence[Row],
    tables: Sequence[tuple[str, Row, Sequence[Row]]],
    charts: Sequence[Chart],
) -> str:
    """Returns the page.

    Args:
        status: how the run stands, one line.
        facts: (what, how much).
        tables: (heading, columns, rows).
    """
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{_PAGE_STYLE}{STYLE}</style>\n</head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<p class="quiet">{escape(status)}</p>',
        *map(chart_svg, charts),
        "<h2>Result</h2>",
        *_table((), facts),
    ]
    for heading, columns, rows in tables:
        parts += [f"<h2>{escape(heading)}</h2>", *_table(columns, rows)]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _table(columns: Row, rows: Sequence[Row]) -> Iterator[str]:
    yield "<table>"
    if columns:
        yield "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"
