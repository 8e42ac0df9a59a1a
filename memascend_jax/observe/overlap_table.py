# SPDX-License-Identifier: Apache-2.0
"""The overlap of computing and I/O as rows, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

OVERLAP_TITLE = "overlap of computing and I/O, from the trace"
OVERLAP_COLUMNS = ("phase", "times", "seconds each", "computing", "I/O", "overlap")


def overlap_rows(overlaps: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns one row per phase; ``overlaps`` as ``Overlap.to_json`` gives them."""
    return [
        (
            one["phase"],
            f"{one['count']}",
            f"{one['seconds'] / one['count']:.3f}",
            f"{one['compute_s'] / one['seconds']:.0%}",
            f"{one['io_s'] / one['seconds']:.0%}",
            "" if one["overlap"] is None else f"{one['overlap']:.0%}",
        )
        for one in overlaps
        if one["seconds"]
    ]


def overlap_table(overlaps: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the rows as a table."""
    table = Table(title=OVERLAP_TITLE, title_justify="left", box=None, pad_edge=False)
    for column in OVERLAP_COLUMNS:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in overlap_rows(overlaps):
        table.add_row(*map(Text, row))
    return table
