# SPDX-License-Identifier: Apache-2.0
"""A plan as tables: where every byte lives, what a step moves, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from memascend_jax.observe.screen import plan_table
from memascend_jax.units import counted, format_bytes, format_duration

Row = tuple[str, str, str]


def plan_tables(rows: Sequence[Row], facts: Mapping[str, Any]) -> list[Table | Text]:
    """Returns the tables of ``rows`` as ``RunPlan.rows`` and ``facts`` as ``PlanAnswer.to_json`` give them."""
    shown = [*rows, *_disk_rows(facts), *_checkpoint_rows(facts)]
    tables: list[Table | Text] = [plan_table(shown), Text()]
    if facts["phases"]:
        tables += [_time_table(facts), Text(_time_text(facts))]
    elif facts["traffic"]:
        tables.append(
            Text("time of a step: give --read-bandwidth and --write-bandwidth, or --measure; and --flops")
        )
    return tables + [Text(f"note: {note}") for note in facts["notes"]]


def _disk_rows(facts: Mapping[str, Any]) -> list[Row]:
    if not facts["disk_bytes_by_durability"]:
        return []
    written = f"{facts['terabytes_written_per_1000_steps']:.3g} TB"
    needed = ", ".join(
        f"{format_bytes(nbytes)} with durability {name}"
        for name, nbytes in facts["disk_bytes_by_durability"].items()
    )
    free = facts["disk_free_bytes"]
    return [
        ("written in 1,000 steps", "SSD", written),
        ("disk space", "SSD", needed + (f"; {format_bytes(free)} free" if free is not None else "")),
    ]


def _checkpoint_rows(facts: Mapping[str, Any]) -> list[Row]:
    checkpoints = facts["checkpoints"]
    if checkpoints is None:
        return []
    seconds = checkpoints["seconds"]
    every = counted(checkpoints["every"], "step", "steps")
    one = f"{format_bytes(checkpoints['step_bytes'])} every {every}"
    return [
        ("checkpoint", "SSD", one + (f", in {_seconds(seconds)}" if seconds is not None else "")),
        (
            "checkpoints in all",
            "SSD",
            f"{format_bytes(checkpoints['disk_bytes'])}  {checkpoints['kept']} kept and one being written",
        ),
    ]


def _time_table(facts: Mapping[str, Any]) -> Table:
    table = Table(title="time of a step", title_justify="left", box=None, pad_edge=False)
    for column in ("phase", "computing", "read", "written", "I/O", "time", "bound by"):
        table.add_column(column, justify="left" if column in ("phase", "bound by") else "right")
    for phase in facts["phases"]:
        compute = phase["compute_s"]
        table.add_row(
            phase["phase"],
            "not known" if compute is None else _seconds(compute),
            format_bytes(phase["read_bytes"]),
            format_bytes(phase["write_bytes"]),
            _seconds(phase["io_s"]),
            _seconds(phase["seconds"]),
            phase["bound_by"],
        )
    return table


def _time_text(facts: Mapping[str, Any]) -> str:
    speeds = facts["speeds"]
    given = f"{speeds['read_bytes_per_s'] / 1e9:.2f} GB/s read, {speeds['write_bytes_per_s'] / 1e9:.2f} GB/s written"
    if speeds["flops"] is not None:
        given += f", {speeds['flops'] / 1e12:.3g} TFLOP/s, {speeds['update_rate'] / 1e9:.2f} G parameters/s updated"
    least = "at least " if speeds["flops"] is None else ""
    return f"a step takes {least}{_seconds(facts['step_seconds'])} at {given}; it waits for {facts['bottleneck']}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else format_duration(value)
