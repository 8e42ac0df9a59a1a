# SPDX-License-Identifier: Apache-2.0
"""The figures of a run as files: ``report.html``, and ``report.png`` where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memascend_jax.observe.chart_png import has_matplotlib, write_png
from memascend_jax.observe.overlap_table import OVERLAP_COLUMNS, OVERLAP_TITLE, overlap_rows
from memascend_jax.observe.report_html import report_page
from memascend_jax.observe.run_charts import run_charts
from memascend_jax.observe.summary import status_line, summary_rows
from memascend_jax.observe.whole_file import write_text_whole, write_whole

NO_PNG = "no report.png: matplotlib is not installed (pip install 'memascend-jax[report]')"


def write_report(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the figures of ``run``, as ``read_run`` gives it, to ``folder`` and returns their paths.

    Without anything to draw the page has the tables only, and there is no PNG.

    Raises:
        OSError: the run's files cannot be read, or ``folder`` cannot be written; the files before are still there.
    """
    charts = run_charts(Path(run["run_dir"]), run["summary"])
    title, overlaps = f"memascend-jax: {run['run_dir']}", overlap_rows(run["overlap"])
    tables = [(OVERLAP_TITLE, OVERLAP_COLUMNS, overlaps)] if overlaps else []
    status = status_line(run["status"]).plain
    page = folder / "report.html"
    text = report_page(title, status, summary_rows(run["summary"]), tables, charts)
    write_text_whole(page, text, "the report")
    if not charts or not has_matplotlib():
        return [page]
    png = folder / "report.png"
    write_whole(png, lambda draft: write_png(charts, draft, f"{run['run_dir']}: {status}"), "the report")
    return [page, png]
