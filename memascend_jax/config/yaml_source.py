# SPDX-License-Identifier: Apache-2.0
"""YAML text as plain values plus the place of every key and value, so that an error can point at it.

Read with PyYAML's composer: no tags are constructed, duplicate keys and aliases that contain themselves are
faults, unquoted scalars stay text (``values.Plain``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from memascend_jax.config.faults import Fault, KeyPath, Place
from memascend_jax.config.values import Plain, is_null

_DEEPEST = 12
_MOST_VALUES = 100_000


@dataclass(slots=True)
class Source:
    """One layer of the configuration: its values, where they stand, and the faults of its form."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    key_places: dict[KeyPath, Place] = field(default_factory=dict)
    value_places: dict[KeyPath, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def read_yaml(name: str, text: str) -> Source:
    """Returns the mapping that ``text`` holds; its faults of form are collected, not raised."""
    source = Source(name)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        place = _marked(name, error.problem_mark or error.context_mark, text)
        source.faults.append(Fault((), f"not valid YAML: {error.problem or error.context}", place))
        return source
    except (yaml.YAMLError, RecursionError) as error:
        source.faults.append(Fault((), f"not valid YAML: {str(error) or 'nested too deeply'}", Place(name)))
        return source
    if root is None:
        return source
    reader = _Reader(source, text.splitlines())
    if isinstance(root, yaml.MappingNode):
        source.values = reader.mapping(root, ())
    else:
        message = f"expected sections such as 'train:' with keys below, got {_kind(root)}"
        source.faults.append(Fault((), message, reader.place(root)))
    return source


def read_value(name: str, path: KeyPath, text: str, place: Place) -> Source:
    """Returns a source with the one value ``text`` at ``path``; lists, maps and quotes are read as YAML."""
    source = Source(name)
    value: Any = None if is_null(text) else Plain(text)
    if text[:1] in ("[", "{", '"', "'"):
        inner = read_yaml(name, f"value: {text}")
        if inner.faults:
            reason = inner.faults[0].message
            source.faults.append(Fault(path, f"cannot read {text!r}: {reason}", place))
            return source
        value = inner.values["value"]
    for depth in range(1, len(path) + 1):
        source.key_places[path[:depth]] = place
    source.value_places[path] = place
    for key in reversed(path):
        value = {key: value}
    source.values = value
    return source


class _Reader:
    """Turns nodes into values and notes where each of them stands."""

    def __init__(self, source: Source, lines: list[str]) -> None:
        self._source = source
        self._lines = lines
        self._count = 0

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(path, f"a key must be text, got {_kind(key_node)}", place)
                continue
            here = (*path, key_node.value)
            if key_node.value in values:
                first = self._source.key_places[here].line
                self._fault(here, f"duplicate key {key_node.value!r}, first given on line {first}", place)
                continue
            self._source.key_places[here] = place
            values[key_node.value] = self._value(value_node, here)
        return values

    def place(self, node: yaml.Node) -> Place:
        start, end = node.start_mark, node.end_mark
        width = end.column - start.column if end.line == start.line else 1
        text = self._lines[start.line] if start.line < len(self._lines) else ""
        return Place(self._source.name, start.line + 1, start.column + 1, max(1, width), text)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._source.value_places[path] = self.place(node)
        self._count += 1
        if self._count >= _MOST_VALUES:
            # Aliases of aliases stand for more values than any memory holds.
            if self._count == _MOST_VALUES:
                self._fault(path, f"more than {_MOST_VALUES} values", self.place(node))
            return None
        if len(path) > _DEEPEST:
            self._fault(path, f"nested more than {_DEEPEST} levels deep", self.place(node))
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return str(node.value)
        return None if is_null(node.value) else Plain(node.value)

    def _fault(self, path: KeyPath, message: str, place: Place) -> None:
        self._source.faults.append(Fault(path, message, place))


def _marked(name: str, mark: yaml.Mark | None, text: str) -> Place:
    if mark is None:
        return Place(name)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    return Place(name, mark.line + 1, mark.column + 1, 1, line)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the value {node.value!r}"
