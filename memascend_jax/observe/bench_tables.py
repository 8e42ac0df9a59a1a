# SPDX-License-Identifier: Apache-2.0
"""The outcome of ``memascend store bench`` as a table: speed, spread and processor time, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def bench_tables(facts: Mapping[str, Any]) -> list[Table | Text]:
    """Returns a table of all contenders per case, and the notes."""
    ratios = {(entry["case"], entry["to"]): entry["ratio"] for entry in facts["ratios"]}
    cases = dict.fromkeys(series["case"] for series in facts["series"])
    tables: list[Table | Text] = [
        _table(case, [s for s in facts["series"] if s["case"] == case], ratios) for case in cases
    ]
    cost = facts["checksums"]
    tables.append(Text(f"checksums: {cost['cpu_s_per_gib']:.3f} s of processor per GiB"))
    tables += [Text(f"note: {note}") for note in facts["notes"]]
    return tables


def _table(case: str, series: list[Mapping[str, Any]], ratios: Mapping[tuple[str, str], float]) -> Table:
    table = Table(title=case, title_justify="left", box=None, pad_edge=False)
    for column in ("", "GB/s", "± MAD", "min", "max", "CPU s/GiB", "store / this", ""):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for one in series:
        if "error" in one:
            table.add_row(Text(one["contender"]), "failed", *[""] * 5, Text(one["error"]))
            continue
        speeds = [f"{one[key] / 1e9:.2f}" for key in ("median", "mad", "min", "max")]
        ratio = ratios.get((case, one["contender"]))
        table.add_row(
            Text(one["contender"]),
            *speeds,
            f"{one['cpu_s_per_gib']:.3f}",
            f"{ratio:.2f}" if ratio is not None else "",
            Text(one.get("note", "")),
        )
    return table
