# SPDX-License-Identifier: Apache-2.0
"""One decoded example with its trained tokens marked, and what became of all examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

_OPEN, _CLOSE = "⟦", "⟧"
_LONGEST = 1500


@dataclass(frozen=True, slots=True)
class Preview:
    """What a user sees of the data before the first step.

    Args:
        spans: the example's text in order, each piece with whether its tokens are trained.
        rows: (what, training, held out).
        notes: sentences that should be seen.
    """

    spans: Sequence[tuple[str, bool]]
    rows: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()


def show_preview(console: Console, preview: Preview) -> None:
    """Prints the counts, the notes and the example; without colours the trained parts stand in ⟦brackets⟧."""
    table = Table(title="data", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("training", justify="right")
    table.add_column("held out", justify="right")
    for row in preview.rows:
        table.add_row(*row)
    console.print(table)
    for note in preview.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print()
    marked = f"in {_OPEN}brackets{_CLOSE}" if _is_plain(console) else "in green"
    console.print(f"one example, trained tokens {marked}:", highlight=False)
    console.print(_marked_text(preview.spans, _is_plain(console)), soft_wrap=True)
    console.print()


def _marked_text(spans: Sequence[tuple[str, bool]], plain: bool) -> Text:
    text = Text()
    for piece, trained in _shortened(spans):
        if not trained:
            text.append(piece, style="dim")
        else:
            text.append(f"{_OPEN}{piece}{_CLOSE}" if plain else piece, style="bold green")
    return text


def _shortened(spans: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    kept: list[tuple[str, bool]] = []
    left = _LONGEST
    for piece, trained in spans:
        if len(piece) > left:
            return [*kept, (piece[:left], trained), (" …", False)]
        kept.append((piece, trained))
        left -= len(piece)
    return kept


def _is_plain(console: Console) -> bool:
    return not console.is_terminal or console.no_color
