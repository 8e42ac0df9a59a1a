# SPDX-License-Identifier: Apache-2.0
"""A JSONL file as examples: one ``{"messages": [...]}`` or ``{"text": "..."}`` per line, read line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.units import counted

_EXPECTED = 'Each line is one object: {"messages": [{"role": …, "content": …}, …]} or {"text": …}.'
_LIKE_TEXT = f"It is not a JSONL file. {_EXPECTED} A plain text goes into one or more of the latter."
_SHOWN_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Example:
    """One example as it was given: a conversation, or a text when ``messages`` is None."""

    where: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None

    @property
    def key(self) -> str:
        """The content as text: equal examples have equal keys."""
        return json.dumps(self.messages, sort_keys=True) if self.messages is not None else f"text:{self.text}"


def read_examples(path: Path) -> Iterator[Example]:
    """Yields the examples of ``path`` in order.

    Raises:
        DataError: the file is missing, unreadable or empty; or, after the last line, how many lines are wrong, and
            what with the first of them. Nothing is yielded after a wrong line.
    """
    shown: list[str] = []
    count = wrong = not_json = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                count += 1
                try:
                    example = _example(line, f"{path}:{number}")
                except ValueError as error:
                    wrong += 1
                    not_json += isinstance(error, _NotJsonError)
                    if len(shown) < _SHOWN_FAULTS:
                        shown.append(f"  {path}:{number}: {error}\n")
                    continue
                if not wrong:
                    yield example
    except OSError as error:
        raise DataError(f"cannot read the data file '{path}': {error.strerror}; set data.source") from error
    if wrong:
        more = f"  and {wrong - len(shown):,} more\n" if wrong > len(shown) else ""
        raise DataError(
            f"the data file '{path}' has {counted(wrong, 'wrong line', 'wrong lines')} of {count:,}:\n"
            f"{''.join(shown)}{more}{_LIKE_TEXT if not_json == count else _EXPECTED}"
        )
    if not count:
        raise DataError(f"the data file '{path}' is empty; expected one JSON object per line")


class _NotJsonError(ValueError):
    pass


def _example(line: bytes, where: str) -> Example:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise _NotJsonError(f"not UTF-8 text (byte {error.start} of the line)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        hint = "; the file looks like one JSON array, write one object per line" if line[:1] == b"[" else ""
        raise _NotJsonError(f"not JSON: {reason} at column {getattr(error, 'colno', 1)}{hint}") from None
    if not isinstance(value, dict):
        raise ValueError(f'expected an object {{"messages": [...]}} or {{"text": "..."}}, got {_kind(value)}')
    has_messages, has_text = "messages" in value, "text" in value
    if has_messages == has_text:
        got = (
            "both"
            if has_text
            else f"the keys {', '.join(map(repr, list(value)[:5])) or 'of an empty object'}"
        )
        raise ValueError(f"expected either 'messages' or 'text', got {got}")
    if has_text:
        if not isinstance(value["text"], str):
            raise ValueError(f"'text' must be text, got {_kind(value['text'])}")
        return Example(where, text=value["text"])
    return Example(where, messages=_messages(value["messages"]))


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"'messages' must be a list of at least one message, got {_kind(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{index}] must be an object, got {_kind(message)}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"messages[{index}] has no {key!r}, only {', '.join(map(repr, message))}")
            if not isinstance(message[key], str):
                raise ValueError(f"messages[{index}].{key} must be text, got {_kind(message[key])}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return "an empty list" if value == [] else kinds.get(type(value), "a number")
