# SPDX-License-Identifier: Apache-2.0
"""The steps of a checkpoint, and the outcome of a check, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from memascend_jax.units import counted, format_bytes


def steps_table(folder: str, steps: Sequence[Mapping[str, Any]]) -> Table:
    """Returns one row per step; ``steps`` as ``describe_step`` gives them."""
    table = _table(folder, "step", "saved", "size", "parameters", "format", "loss", "held-out loss", "")
    for step in steps:
        if step["fault"] is not None:
            table.add_row(str(step["step"]), "", "", "", "", "", "", "not usable")
            continue
        saved = datetime.fromtimestamp(step["saved_s"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        size, losses = format_bytes(step["bytes"]), [_loss(step["loss"]), _loss(step["eval_loss"])]
        row = [str(step["step"]), saved, size, f"{step['parameters']:,}", step["state_format"], *losses, ""]
        table.add_row(*row)
    return table


def verify_table(folder: str, steps: Sequence[Mapping[str, Any]]) -> Table:
    """Returns one row per step with what was read of it and how many faults it has."""
    table = _table(folder, "step", "arrays", "read", "result")
    for step in steps:
        faults = len(step["faults"])
        whole = "every checksum matches"
        if not step["digests_recorded"]:
            whole += "; of which file: not recorded, it is of an earlier version"
        result = counted(faults, "fault", "faults") if faults else whole
        table.add_row(str(step["step"]), f"{step['arrays']:,}", format_bytes(step["bytes"]), result)
    return table


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("saved", "format", "result", "") else "right")
    return table
