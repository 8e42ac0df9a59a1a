# SPDX-License-Identifier: Apache-2.0
"""ShareGPT's conversations as messages: ``{"conversations": [{"from": "human", "value": …}, …], "system": …}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memascend_jax.data.messages import Message, kind_of, messages_of, tool_call

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_CALL = "function_call"


def sharegpt_messages(record: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a record; its ``system`` text comes first.

    Raises:
        ValueError: it is not as it must be; in words.
    """
    turns, system = record["conversations"], record.get("system", "")
    if not isinstance(system, str):
        raise ValueError(f"'system' must be text, got {kind_of(system)}")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'conversations' must be a list of at least one turn, got {kind_of(turns)}")
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return before + messages_of(turns, "conversations")
    return before + [_turn(turn, f"conversations[{index}]") for index, turn in enumerate(turns)]


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} must be an object, got {kind_of(turn)}")
    for key in ("from", "value"):
        if key not in turn:
            raise ValueError(f"{where} has no {key!r}, only {', '.join(map(repr, turn)) or 'nothing'}")
        if not isinstance(turn[key], str):
            raise ValueError(f"{where}.{key} must be text, got {kind_of(turn[key])}")
    speaker, value = turn["from"], turn["value"]
    if speaker == _CALL:
        return {"role": "assistant", "content": "", "tool_calls": _calls(value, where)}
    if speaker not in _ROLES:
        raise ValueError(f"{where}.from is {speaker!r}; known are {', '.join((*_ROLES, _CALL))}")
    message: Message = {"role": _ROLES[speaker], "content": value}
    if turn.get("weight") is not None:
        message["weight"] = turn["weight"]
    return messages_of([message], where)[0] if "weight" in message else message


def _calls(value: str, where: str) -> list[Message]:
    try:
        called = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where}.value must be a function call as JSON: {error}") from None
    calls = called if isinstance(called, list) else [called]
    return [tool_call(call, f"{where}.value") for call in calls]
