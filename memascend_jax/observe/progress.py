# SPDX-License-Identifier: Apache-2.0
"""How far a run is: a bar on a terminal, else one ``key=value`` line at most every 30 seconds. Always to stderr."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from memascend_jax.units import format_bytes, format_duration

SECONDS_BETWEEN_LINES = 30.0
_RECENT_STEPS = 8


class OnLine(Protocol):
    """Told each metrics line."""

    def __call__(self, line: Mapping[str, Any], /) -> None: ...


class OnItem(Protocol):
    """Told the name of each thing that is done."""

    def __call__(self, name: str, /) -> None: ...


@contextmanager
def show_training(console: Console, total_steps: int, done_steps: int = 0) -> Iterator[OnLine]:
    """Shows the steps of a run while the block runs; call what it yields with each metrics line."""
    pace = _Pace(total_steps)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with _bar(console, *columns) as bar:
            task = bar.add_task("step", total=total_steps, completed=done_steps, figures="compiling")
            yield lambda line: _advance(bar, task, pace, line)
    else:
        lines = _Lines(console)
        yield lambda line: lines.say(pace.fields(line), always=line["step"] in (done_steps + 1, total_steps))


@contextmanager
def show_items(console: Console, label: str, total: int) -> Iterator[OnItem]:
    """Shows ``total`` things being done while the block runs; call what it yields after each."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        with _bar(console, *columns) as bar:
            task = bar.add_task(label, total=total)
            yield lambda name: bar.advance(task)
    else:
        lines, done = _Lines(console), 0

        def on_item(name: str) -> None:
            nonlocal done
            done += 1
            lines.say({"doing": label.replace(" ", "_"), "done": f"{done}/{total}"}, always=done == total)

        yield on_item


def _bar(console: Console, *columns: TextColumn | BarColumn | MofNCompleteColumn) -> Progress:
    # Four times a second: a faster bar takes processor time from the step on a machine of two cores.
    return Progress(*columns, console=console, refresh_per_second=4, transient=False)


def _advance(bar: Progress, task: TaskID, pace: _Pace, line: Mapping[str, Any]) -> None:
    shown = pace.fields(line)
    figures = (
        f"loss {shown['loss']}  {shown['host_rss']}  SSD {shown['ssd_read']}/{shown['ssd_write']} per step"
    )
    if "time_left" in shown:
        figures += f"  {shown['tokens_per_s']} tok/s  {shown['time_left']} left"
    bar.update(task, completed=line["step"], figures=figures)


class _Pace:
    """Figures for people from a metrics line; speed and time left from the median of the last steps.

    The first step compiles, which says nothing about the rest: it has neither.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._compiled = False
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._tokens: deque[int] = deque(maxlen=_RECENT_STEPS)

    def fields(self, line: Mapping[str, Any]) -> dict[str, str]:
        fields = {
            "step": f"{line['step']}/{self._total}",
            "loss": "nan" if line["loss"] is None else f"{line['loss']:.4f}",
            "host_rss": format_bytes(line["host_rss_bytes"]),
            "ssd_read": format_bytes(line["ssd_read_bytes"]),
            "ssd_write": format_bytes(line["ssd_write_bytes"]),
        }
        if not self._compiled:
            self._compiled = True
            return fields
        self._seconds.append(line["step_seconds"])
        self._tokens.append(line["tokens"])
        speed = sum(self._tokens) / sum(self._seconds) if sum(self._seconds) else 0.0
        left = (self._total - line["step"]) * statistics.median(self._seconds)
        return {**fields, "tokens_per_s": f"{speed:.1f}", "time_left": format_duration(left)}


class _Lines:
    """Writes ``key=value`` lines, seldom enough for a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = float("-inf")

    def say(self, fields: Mapping[str, str], *, always: bool) -> None:
        now = time.monotonic()
        if not always and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        text = " ".join(f"{key}={value.replace(' ', '')}" for key, value in fields.items())
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
