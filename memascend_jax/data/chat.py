# SPDX-License-Identifier: Apache-2.0
"""A chat template: messages to text, with the character ranges of the assistant's answers.

A template comes with the model's files and is not trusted: it runs in jinja2's immutable sandbox, and its
loops, its output and the strings it multiplies are bounded. Known shortcoming: a hostile template can still
join its own output again and again (``{% set x = x ~ x %}``) and use memory until the time limit.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memascend_jax.data.messages import Message
from memascend_jax.errors import DataError

Range = tuple[int, int]

REMEDY = (
    "Another one can be chosen: data.chat_template=chatml (or llama3, mistral, qwen, gemma, or a .jinja file)"
)
SECONDS = 5.0
MOST_CHARACTERS = 1 << 24
_TICK = "_memascend_tick"
# Unguessable, so that no message can claim to be an answer.
_OPEN, _CLOSE = (f"\x00{secrets.token_hex(8)}{end}\x00" for end in "<>")


@dataclass(slots=True)
class ChatTemplate:
    """The compiled template; ``special_tokens`` are what it may name, as ``bos_token``; ``name`` is for messages."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    name: str = "the model's chat template"
    _template: jinja2.Template = field(init=False, repr=False)
    _clock: _Clock = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._clock = _Clock()
        environment = _environment(self._clock)
        try:
            tree = environment.parse(self.source)
            loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
            for loop in loops:
                tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise DataError(f"{self.name} does not compile: {error}{where}. {REMEDY}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Returns the text of ``messages``; with the start of an answer after them when asked for.

        Raises:
            DataError: the template refuses the messages, fails, or exceeds its limits.
        """
        return self._marked(messages, add_generation_prompt, tools).replace(_OPEN, "").replace(_CLOSE, "")

    def answers(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Range | None]]:
        """Returns the text and the [start, end) ranges of what the assistant says, its end token included.

        A template with ``{% generation %}`` blocks says so itself; there is a range for each block. Of any other, an
        answer is what a message adds to the text of the messages before it; there is a range for each answer, None for
        a turn that the template shows otherwise once more messages follow (some drop earlier reasoning).
        """
        marked = self._marked(messages, False, tools)
        if _OPEN in marked:
            text, found = _unmarked(marked)
            return text, list(found)
        ranges: list[Range | None] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], add_generation_prompt=True, tools=tools)
            is_last = index == len(messages) - 1
            after = marked if is_last else self.render(messages[: index + 1], tools=tools)
            is_part = marked.startswith(after) and after.startswith(before)
            # Whitespace after the end token belongs to the template, not to the answer.
            ranges.append((len(before), len(after.rstrip())) if is_part else None)
        return marked, ranges

    def _marked(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None
    ) -> str:
        self._clock.start()
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
                documents=None,
                **self.special_tokens,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise _LimitError(f"it wrote more than {MOST_CHARACTERS:,} characters")
        except DataError:
            raise
        except Exception as error:  # A template runs foreign expressions: any exception may leave it.
            raise DataError(f"{self.name} failed: {str(error) or type(error).__name__}. {REMEDY}") from error
        return "".join(pieces)


class _LimitError(Exception):
    pass


class _Clock:
    """Raises in a template's loop when the rendering has taken too long."""

    def __init__(self) -> None:
        self._deadline = 0.0

    def start(self) -> None:
        self._deadline = time.monotonic() + SECONDS

    def tick(self) -> str:
        if time.monotonic() > self._deadline:
            raise _LimitError(f"it ran for more than {SECONDS:g} s")
        return ""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise _LimitError("it formats text with %, which is not allowed")
        sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
        if operator != "%" and (sizes[0] or 1) * (sizes[1] or 1) > MOST_CHARACTERS:
            raise _LimitError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: what the assistant says, as transformers has it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it as a class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment(clock: _Clock) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals[_TICK] = clock.tick
    # No clock for the template (`strftime_now`): the same data would give other tokens on another day.
    return environment


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _unmarked(marked: str) -> tuple[str, list[Range]]:
    text, ranges = "", list[Range]()
    for part in marked.split(_OPEN):
        inside, close, outside = part.partition(_CLOSE)
        if close:
            ranges.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, ranges
