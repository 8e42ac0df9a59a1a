# SPDX-License-Identifier: Apache-2.0
"""Everything a run shows: plan, data and progress on stderr, the result on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memascend_jax.observe.example import Preview, show_preview
from memascend_jax.observe.progress import OnItem, OnLine, show_items, show_training
from memascend_jax.observe.summary import Sample, sample_table, summary_table

#: Columns where no terminal says how wide it is: a log should not be folded at 80.
_LOG_WIDTH = 120

CoderT = TypeVar("CoderT", contravariant=True)


class HasPreview(Protocol[CoderT]):
    """Data that can show itself, decoded with a tokenizer."""

    def preview(self, coder: CoderT | None) -> Preview: ...


class Screen:
    """The terminal of a run, or its log. NO_COLOR is respected; bars appear on a terminal only."""

    def __init__(self) -> None:
        self.log = build_console(stderr=True)
        self.out = build_console(stderr=False)

    def say(self, text: str) -> None:
        """Writes one line to the log."""
        self.log.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_plan(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Shows where every byte will live: (what, where, how much)."""
        self.log.print(plan_table(rows))
        self.log.print()

    def show_data(self, data: HasPreview[CoderT], coder: CoderT | None) -> None:
        """Shows what became of the examples, and one of them decoded."""
        show_preview(self.log, data.preview(coder))

    def progress(self, label: str, total: int) -> AbstractContextManager[OnItem]:
        """Shows ``total`` things being done; the block calls what it gets with the name of each."""
        return show_items(self.log, label, total)

    def training(self, total_steps: int, done_steps: int = 0) -> AbstractContextManager[OnLine]:
        """Shows the steps; the block calls what it gets with each metrics line."""
        return show_training(self.log, total_steps, done_steps)

    def show_summary(self, summary: Mapping[str, Any], samples: Sequence[Sample] = ()) -> None:
        """Prints the result: the closing table and the sample answers."""
        if samples:
            self.out.print(sample_table(samples))
        self.out.print(summary_table(summary))

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.log.file, self.out.file):
            stream.flush()


def build_console(*, stderr: bool) -> Console:
    """Returns a console on stderr or stdout, as wide as the terminal, or wide enough for a log."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def plan_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Returns the plan as a table."""
    table = Table(title="plan", title_justify="left", box=None, pad_edge=False)
    for name in ("what", "where", "how much"):
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
