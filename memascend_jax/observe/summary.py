# SPDX-License-Identifier: Apache-2.0
"""The closing table of a run, and the same for a run folder later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from memascend_jax.observe.step_figures import SPLIT
from memascend_jax.units import format_bytes, format_duration

#: Question, the data's answer, the model's answer before, and after.
Sample = tuple[str, str, str, str]


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (what, how much) for the figures that ``summary`` has; keys as in ``summary.json``."""
    has = summary.get
    rows: list[tuple[str, str | None]] = [
        ("parameters", _count(has("parameters"))),
        ("steps", _count(has("step"))),
        ("held-out loss", _change(has("eval_loss_before"), has("eval_loss_after"))),
        ("training loss", _change(has("loss_first"), has("loss_last"))),
        ("step time, median", _seconds(has("step_seconds_median"))),
        ("trained tokens per second", _decimal(has("tokens_per_second"))),
        ("time of a step", _split(summary)),
        ("read from SSD per step", _planned(summary, "ssd_read_bytes_per_step")),
        ("written to SSD per step", _planned(summary, "ssd_write_bytes_per_step")),
        ("written to SSD in all", _size(has("ssd_write_bytes"))),
        ("host memory, peak", _host(summary)),
        ("pinned memory", _size(has("pinned_bytes"))),
        ("device memory, peak", _size(has("device_peak_bytes")) if has("device_peak_bytes") else None),
        ("skipped steps", _count(has("skipped_steps")) if has("skipped_steps") else None),
    ]
    return [(what, text) for what, text in rows if text is not None]


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Returns the closing table. Cells are ``Text``: rich would take [brackets] in a string for markup."""
    table = Table(title="result", title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    for row in summary_rows(summary):
        table.add_row(*map(Text, row))
    return table


def sample_table(samples: Sequence[Sample]) -> Table:
    """Returns the questions with the data's answer and the model's before and after training."""
    table = Table(title="answers", title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for question, answer, before, after in samples:
        for label, text in (
            ("question", question),
            ("in the data", answer),
            ("before", before),
            ("after", after),
        ):
            table.add_row(label, Text(text))
        table.add_row("", "")
    return table


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _decimal(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _seconds(value: float | None) -> str | None:
    return None if value is None else format_duration(value) if value >= 1 else f"{value * 1000:.0f} ms"


def _size(value: int | None) -> str | None:
    return None if value is None else format_bytes(value)


def _change(before: float | None, after: float | None) -> str | None:
    if before is None or after is None:
        return None
    percent = f"  ({(after / before - 1) * 100:+.1f} %)" if before else ""
    return f"{before:.4f} → {after:.4f}{percent}"


def _planned(summary: Mapping[str, Any], key: str) -> str | None:
    value, planned = summary.get(key), summary.get(f"planned_{key}")
    if value is None:
        return None
    return format_bytes(value) + (f"  ({value / planned:.3f} of the plan)" if planned else "")


def _host(summary: Mapping[str, Any]) -> str | None:
    peak, planned = summary.get("host_peak_bytes"), summary.get("planned_host_bytes")
    if peak is None:
        return None
    return format_bytes(peak) + (f"  (planned {format_bytes(planned)})" if planned else "")


def _split(summary: Mapping[str, Any]) -> str | None:
    """The shares of the steps' time, in whole percent that add up to no more than 100."""
    total = summary.get("step_seconds")
    parts = {name: summary[name] / total for name in SPLIT if total and summary.get(name)}
    # Each rounded by itself they could be 102 together: the largest remainders are rounded up.
    whole = {name: int(share * 100) for name, share in parts.items()}
    left = round(sum(parts.values()) * 100) - sum(whole.values())
    for name in sorted(parts, key=lambda name: whole[name] - parts[name] * 100)[:left]:
        whole[name] += 1
    return ", ".join(f"{name.replace('_', ' ')} {percent}%" for name, percent in whole.items()) or None


def status_line(status: Mapping[str, Any]) -> Text:
    """Returns one line on whether the run runs, stopped, died or is done; keys as ``read_run`` gives them."""
    if not status:
        return Text("no status was recorded")
    message = f": {status['message']}" if status.get("message") else ""
    return Text(
        f"{status.get('state', 'unknown')} at step {status.get('step')} of {status.get('total_steps')}{message}"
    )
