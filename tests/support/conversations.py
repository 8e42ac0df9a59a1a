# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001  (signs of many scripts are what this is about)
"""Conversations shaped as those that people train on, made from a number: the same on every machine.

Several turns, system prompts, code, tables, other scripts, emoji, odd spaces, tools and their results, text that looks
like special tokens. No random generator of a library is used, so that golden values stay.
"""

from __future__ import annotations

import hashlib
from typing import Any

_SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly, in the language of the question.\n\n- no lists\n- no apologies",
    "  Du bist ein Assistent für Köche.  ",
    "あなたは親切なアシスタントです。",
)
_ASKED = (
    "What does `sorted(x, key=len)` do?",
    "Write a function that reverses a linked list in C++.",
    'Translate: "L\'été, il fait chaud à Málaga" — into English, please…',
    "日本の首都はどこですか？また、その人口は？",
    "summarise:\n\n\tItem\tPrice\n\tTea\t3,50 €\n\tMilk\t1.20 £\n",
    "   why   are there   so many spaces   ?   ",
    "1234567890 * 98765 = ? Show 3 steps & the result in <b>bold</b>",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 what are these?",
    "Пожалуйста, объясни теорему Пифагора.",
    "http://example.com/a?b=c&d=%20e#f is broken, isn't it? It's what I'd've thought…",
    "a",
    "\n\nleading and trailing newlines\n\n",
    "السلام عليكم، كيف حالك؟",
    "fix this:\n```python\ndef f(x):\n  return x+1 if x>0 else None  # TODO\n```\nthanks!!!",
)
_ANSWERED = (
    "It sorts `x` by the **length** of its items.\n\n1. `key` is called once per item\n2. the sort is *stable*",
    "```cpp\nNode* reverse(Node* head) {\n    Node* prev = nullptr;\n    while (head) { auto* next = head->next; }\n"
    "    return prev;\n}\n```",
    "\nStarts with a newline, then says: In summer it is hot in Málaga.",
    "東京です。人口は約1,400万人です。",
    "| Item | Price |\n|------|------:|\n| Tea  | 3.50  |\n",
    "   indented answer   ",
    "1234567890 × 98765 = 121,932,109,… <b>approximately</b>",
    "😀 a face, 👩‍👩‍👧‍👦 a family, 🏳️‍🌈 a flag 🎉",
    "Квадрат гипотенузы равен сумме квадратов катетов: a² + b² = c².",
    "I'm sorry, but I can't. You've said: don't.",
    "Yes.",
    "",
    "وعليكم السلام! أنا بخير، شكراً.",
    "The token <|im_end|> ends a turn, </s> and <end_of_turn> too; [INST] and <|eot_id|> are others.",
    "word " * 60,
)
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather at a place — now.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "unit": {"type": "string", "enum": ["°C", "°F"]}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}},
)


def conversation(number: int) -> dict[str, Any]:
    """Returns a record ``{"messages": …}``, some with ``tools``."""
    draw = _Draws(number)
    messages: list[dict[str, Any]] = []
    if draw(3) == 0:
        messages.append({"role": "system", "content": draw.of(_SYSTEMS)})
    with_tools = draw(6) == 0
    for _ in range(1 + draw(4)):
        messages.append({"role": "user", "content": draw.of(_ASKED)})
        if with_tools and draw(2):
            calls = [_call(draw) for _ in range(1 + draw(2))]
            messages.append(
                {"role": "assistant", "content": draw.of(("", "Let me look. ")), "tool_calls": calls}
            )
            messages += [
                {"role": "tool", "content": f'{{"temperature": {draw(40)}, "sky": "klar ☀"}}'} for _ in calls
            ]
        messages.append({"role": "assistant", "content": draw.of(_ANSWERED)})
    record: dict[str, Any] = {"messages": messages}
    if with_tools:
        record["tools"] = list(_TOOLS)
    return record


def _call(draw: _Draws) -> dict[str, Any]:
    arguments = {"place": draw.of(("Köln", "東京", "New York")), "unit": draw.of(("°C", "°F"))}
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}


class _Draws:
    """Whole numbers from the digest of a number, one after another."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed, 0

    def __call__(self, below: int) -> int:
        self._count += 1
        digest = hashlib.sha256(f"{self._seed}:{self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % below

    def of(self, choices: tuple[Any, ...]) -> Any:
        """Returns one of ``choices``."""
        return choices[self(len(choices))]
