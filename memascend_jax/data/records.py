# SPDX-License-Identifier: Apache-2.0
"""One record of a data file as an example: which kind it is, and what is wrong with it.

A record is an object as JSON has it. What it says is checked here; files and lines are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memascend_jax.data.messages import Message, kind_of, messages_of, tools_of
from memascend_jax.data.sharegpt import sharegpt_messages

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Example:
    """One example as it was given: a conversation, or a text when ``messages`` is None.

    Attributes:
        where: file and line, as text when it is shown.
        prompt: what stands before ``text`` and is not trained; None: all of ``text`` is.
        tools: what a template may show of the tools, as JSON has it.
        begins, ends: whether ``text`` is the beginning, and the end, of its document.
        kind: of the record that it was.
    """

    where: object
    messages: list[Message] | None = None
    text: str | None = None
    prompt: str | None = None
    tools: list[Any] | None = None
    begins: bool = True
    ends: bool = True
    kind: str = "text"

    @property
    def key(self) -> str:
        """The content as text: equal examples have equal keys."""
        if self.messages is not None:
            # What has no tools has the key that it always had, which decides the split.
            return json.dumps([self.messages, self.tools] if self.tools else self.messages, sort_keys=True)
        return f"text:{self.text}" if self.prompt is None else json.dumps([self.prompt, self.text])

    def texts(self) -> Iterator[str]:
        """Yields what a person, or a tool, has said in it."""
        yield from (text for text in (self.prompt, self.text) if text is not None)
        yield from (message.get("content", "") for message in self.messages or ())


def example_of(value: Any, where: object, kind: str = AUTO) -> Example:
    """Returns the example that a record is.

    Args:
        kind: what it must be; ``auto``: it is recognised by its keys.

    Raises:
        ValueError: it is of no kind, of several, of another, or not as its kind must be; in words.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {kind_of(value)}. {EXPECTED}")
    # Tables have every column in every row: what a row does not have is null there.
    record = {key: item for key, item in value.items() if item is not None}
    return _READERS[_recognised(record, kind)](record, where)


def _recognised(record: Mapping[str, Any], kind: str) -> str:
    has = [name for name, keys in KINDS.items() if all(key in record for key in keys)]
    if kind != AUTO:
        if kind not in has:
            raise ValueError(f"expected a record of data.kind={kind} ({_shape(kind)}), got {_keys(record)}")
        return kind
    if len(has) > 1:
        raise ValueError(
            f"it can be read as {' and as '.join(map(_shape, has))}: choose one with data.kind={has[0]} or "
            f"data.kind={has[1]}"
        )
    if not has:
        raise ValueError(f"of no known kind: it has {_keys(record)}. {EXPECTED}")
    return has[0]


def _keys(record: Mapping[str, Any]) -> str:
    shown = ", ".join(map(repr, list(record)[:6]))
    return f"the keys {shown}{', …' if len(record) > 6 else ''}" if record else "no key with a value"


def _shape(kind: str) -> str:
    return "{" + ", ".join(map(repr, KINDS[kind])) + "}"


def _chat(record: Mapping[str, Any], where: object) -> Example:
    messages = messages_of(record["messages"], "messages")
    return Example(where, messages=messages, tools=tools_of(record.get("tools")), kind="messages")


def _sharegpt(record: Mapping[str, Any], where: object) -> Example:
    messages = sharegpt_messages(record)
    return Example(where, messages=messages, tools=tools_of(record.get("tools")), kind="sharegpt")


def _alpaca(record: Mapping[str, Any], where: object) -> Example:
    texts = {key: _text(record, key) for key in ("instruction", "input", "output", "system") if key in record}
    messages: list[Message] = []
    if texts.get("system"):
        messages.append({"role": "system", "content": texts["system"]})
    for index, turn in enumerate(record.get("history") or ()):
        if not isinstance(turn, list | tuple) or [type(text) for text in turn] != [str, str]:
            raise ValueError(f"history[{index}] must be a list of two texts, got {kind_of(turn)}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    asked = texts["instruction"] + (f"\n\n{texts['input']}" if texts.get("input") else "")
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]}]
    return Example(where, messages=messages, kind="alpaca")


def _prompted(record: Mapping[str, Any], where: object) -> Example:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(where, text=completion, prompt=prompt, kind="prompt_completion")
    if not isinstance(prompt, list):
        raise ValueError(
            f"'prompt' and 'completion' must be both text, or the prompt a list of messages; got {kind_of(prompt)} and "
            f"{kind_of(completion)}"
        )
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    # What the prompt's assistant says is context here.
    before: list[Message] = [{**message, "weight": 0} for message in messages_of(prompt, "prompt")]
    messages = before + messages_of(completion, "completion")
    return Example(where, messages=messages, tools=tools_of(record.get("tools")), kind="prompt_completion")


def _plain(record: Mapping[str, Any], where: object) -> Example:
    return Example(where, text=_text(record, "text"), kind="text")


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, got {kind_of(value)}")
    return value


#: The keys by which each kind is recognised.
KINDS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
EXPECTED = (
    'A record is {"messages": [{"role": …, "content": …}, …]}, {"conversations": [{"from": …, "value": …}, …]},'
    ' {"instruction": …, "output": …}, {"prompt": …, "completion": …} or {"text": …}.'
)
_READERS: Mapping[str, Callable[[Mapping[str, Any], object], Example]] = {
    "messages": _chat,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompted,
    "text": _plain,
}
