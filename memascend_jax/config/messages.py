# SPDX-License-Identifier: Apache-2.0
"""What a validation error of pydantic says to a user, in our words, with the nearest valid key or value."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import ErrorDetails

from memascend_jax.config.faults import ELSEWHERE, KeyPath, dotted, nearest, shown
from memascend_jax.config.schema import fields, section_types
from memascend_jax.config.sections import DataSource, ParameterGroup, Section

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
}
#: Lists of entries with keys of their own.
_ENTRIES: Mapping[KeyPath, type[Section]] = {
    ("optimizer", "groups"): ParameterGroup,
    ("data", "sources"): DataSource,
}
_BOUND = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def fault_message(detail: ErrorDetails) -> tuple[KeyPath, str, bool]:
    """Returns the key's path, the sentence, and whether the key (rather than its value) is at fault."""
    path: KeyPath = tuple(detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return path, f"unknown key {dotted(path)!r}{_hint(path)}", True
    if kind == "missing":
        return path, f"{dotted(path[:-1])} needs the key {str(path[-1])!r}", True
    return path, f"{dotted(path)}: {_expectation(detail)}", False


def _expectation(detail: ErrorDetails) -> str:
    kind, context, got = detail["type"], detail.get("ctx", {}), shown(detail["input"])
    if kind in _BOUND:
        words, name = _BOUND[kind]
        return f"must be {words} {context[name]}, got {got}"
    if kind == "literal_error":
        words = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        close = nearest(str(detail["input"]), words.split(", "))
        return f"expected one of {words}, got {got}" + (f"; did you mean {close!r}?" if close else "")
    if kind == "value_error":
        return str(context["error"])
    return f"expected {_EXPECTED.get(kind, detail['msg'])}, got {got}"


def _hint(path: KeyPath) -> str:
    word = str(path[-1])
    if len(path) == 4 and path[:2] in _ENTRIES:
        close = nearest(word, _ENTRIES[path[:2]].model_fields)
        return f"; did you mean {close!r}?" if close else ""
    known = [key for key, _ in fields()]
    if word in known:
        section, name = word.split(".", 1)
        return f"; write it as '{name}:' under '{section}:'"
    elsewhere = [key for key in known if key.split(".")[1] == word]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    section = str(path[0])
    if len(path) == 1:
        names = [key.split(".")[1] for key in known]
        close = nearest(word, section_types()) or nearest(word, names, likeness=ELSEWHERE)
        match = [key for key in known if key.split(".")[1] == close]
        return f"; did you mean {(match[0] if match else close)!r}?" if close else ""
    siblings = {key.split(".")[1]: key for key in known if key.split(".")[0] == section}
    close = nearest(word, siblings)
    if close:
        return f"; did you mean {siblings[close]!r}?"
    anywhere = nearest(word, [key.split(".")[1] for key in known], likeness=ELSEWHERE)
    match = [key for key in known if key.split(".")[1] == anywhere]
    return f"; did you mean {match[0]!r}?" if match else f"; {section} has {', '.join(siblings)}"
