# SPDX-License-Identifier: Apache-2.0
"""A fault of the configuration: the key, what is wrong, and the place in the file or on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memascend_jax.errors import ConfigError
from memascend_jax.units import counted

KeyPath = tuple[str | int, ...]
#: A word that is wrong in its place has to be nearer to one of another place: ``cache`` is 0.6 like ``trace``.
ELSEWHERE = 0.75


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key or value stands; line and column count from 1, line 0 is a source without lines."""

    source: str
    line: int = 0
    column: int = 0
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong; ``path`` is the key's."""

    path: KeyPath
    message: str
    place: Place | None = None

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.message}{_excerpt(self.place)}"


def dotted(path: KeyPath) -> str:
    """Returns ``path`` as a user writes it: ``optimizer.groups[0].match``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """Returns ``value`` as a message says what was given."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Returns the known word that ``word`` is most likely a misspelling of, or None.

    Args:
        likeness: the least that both must have in common, 0 to 1; ``ELSEWHERE`` among the words of another place.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[found[0]] if found else None


def config_error(faults: Sequence[Fault]) -> ConfigError:
    """Returns the one error that reports all ``faults``, in the order of the files' lines."""
    ordered = sorted(faults, key=_order)
    count = counted(len(ordered), "fault", "faults")
    return ConfigError(f"the configuration has {count}:\n" + "\n".join(str(fault) for fault in ordered))


def _order(fault: Fault) -> tuple[str, int]:
    return (fault.place.source, fault.place.line) if fault.place else ("", 0)


def _excerpt(place: Place | None) -> str:
    if place is None or not place.text:
        return ""
    number = str(place.line) if place.line else ""
    # A tab stays a tab above the caret, so that both lines are indented alike on any terminal.
    before = place.text[: place.column - 1]
    indent = "".join(character if character == "\t" else " " for character in before)
    margin = " " * len(number)
    return f"\n  {number} | {place.text.rstrip()}\n  {margin} | {indent}{'^' * place.width}"
