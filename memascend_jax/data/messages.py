# SPDX-License-Identifier: Apache-2.0
"""The messages of a conversation, as OpenAI's interface has them and as chat templates read them.

A template reads texts: lists of text parts are joined, arguments of tool calls that are JSON text become objects, keys
without a value go, and the reasoning of an answer has one name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

ASSISTANT = "assistant"
#: Names of an answer's reasoning; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def messages_of(value: Any, key: str) -> list[Message]:
    """Returns the messages of the list under ``key``.

    Raises:
        ValueError: it is no such list; in words.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} must be a list of at least one message, got {kind_of(value)}")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def tools_of(value: Any) -> list[Any] | None:
    """Returns the tools of a record: a list, or the text of one, which tables have.

    Raises:
        ValueError: they are neither; in words.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"'tools' is text, but not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"'tools' must be a list of objects, got {kind_of(value)}")
    return [without_nulls(tool) for tool in value]


def tool_call(value: Any, where: str) -> Message:
    """Returns a call of a tool as ``{"type": "function", "function": {"name": …, "arguments": {…}}}``.

    Raises:
        ValueError: it has no name; in words.
    """
    call = without_nulls(value) if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must name a function, got {kind_of(value)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    named = {"name": function["name"], "arguments": arguments}
    rest = {key: item for key, item in call.items() if key in ("id", "type")} if "function" in call else {}
    return {"type": "function", **rest, "function": named}


def kind_of(value: Any) -> str:
    """Returns what a value of JSON is, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return "an empty list" if value == [] else kinds.get(type(value), "a number")


def without_nulls(value: Any) -> Any:
    """Returns ``value`` without keys that have none, at any depth: tables have every key in every row."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {kind_of(value)}")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str):
        got = f"{where}.role must be text, got {kind_of(role)}"
        raise ValueError(got if "role" in value else f"{where} has no 'role', only {_keys(value)}")
    if role == "function":
        message["role"] = "tool"
    calls = message.get("tool_calls") or []
    if "function_call" in message:
        calls = [message.pop("function_call")]
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, got {kind_of(calls)}")
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if "content" not in message and calls:
        message["content"] = ""
    elif "content" not in value:
        raise ValueError(f"{where} has no 'content', only {_keys(value)}")
    else:
        message["content"] = _content(value["content"], f"{where}.content")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where}.weight must be 0 (not trained) or 1, got {message['weight']!r}")
    reasoning = next((message.pop(name) for name in _REASONING if name in message), None)
    for name in _REASONING:
        message.pop(name, None)
    if reasoning is not None:
        message[_REASONING[0]] = reasoning
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be text, got {kind_of(value)}")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            raise ValueError(f"{where}[{index}] is of type {kind!r}: only text is trained here")
        if not isinstance(text, str):
            raise ValueError(f"{where}[{index}] must be a part with a text, got {kind_of(part)}")
        texts.append(text)
    return "".join(texts)


def _object(text: str) -> Any:
    """What JSON text says when it is an object, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "nothing"
