# SPDX-License-Identifier: Apache-2.0
"""Examples to tokens, each token marked as trained or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from memascend_jax.data.chat import REMEDY, ChatTemplate, Range
from memascend_jax.data.examples import BoolArray, Encoded, IntArray
from memascend_jax.data.messages import ASSISTANT, Message
from memascend_jax.data.records import Example
from memascend_jax.errors import DataError

#: Roles of a message that stands where a system prompt would.
_SYSTEM = ("system", "developer")


class Rendered(NamedTuple):
    """A conversation as text, the character ranges in it that are trained, and how many answers the text shows."""

    text: str
    ranges: list[Range]
    answers: int


@dataclass(slots=True)
class Coder:
    """A model's tokenizer, chat template and special tokens.

    Args:
        tokenizer: of the model.
        chat_template: jinja2 source, or None for a model that does not chat.
        special_ids: by the names ``bos``, ``eos``, ``pad``, ``unk``; absent or None where the model has none.
        template_name: what messages call the template.
        train_on: ``all`` answers of a conversation, or the ``last``.
        system_prompt: first message of conversations that have none; None: they stay without.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special_ids: Mapping[str, int | None] = field(default_factory=dict)
    template_name: str = "the model's chat template"
    train_on: str = "all"
    system_prompt: str | None = None
    template: ChatTemplate | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # What a model's file may set for its own use would cut examples, or pad them, without a word.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if self.chat_template is not None:
            named = {
                name: self.tokenizer.id_to_token(i) for name, i in self.special_ids.items() if i is not None
            }
            tokens = {f"{name}_token": token for name, token in named.items() if token is not None}
            self.template = ChatTemplate(self.chat_template, tokens, self.template_name)

    def digest(self) -> str:
        """Returns a SHA-256, in hex, of all that decides the tokens of an example and which of them are trained."""
        digest = hashlib.sha256(self.tokenizer.to_str().encode())
        rest = [self.chat_template, sorted(self.special_ids.items()), self.train_on, self.system_prompt]
        digest.update(json.dumps(rest).encode())
        return digest.hexdigest()

    @property
    def eos_id(self) -> int | None:
        return self.special_ids.get("eos")

    @property
    def pad_id(self) -> int:
        """Token that fills a sequence; nothing attends to it and no loss counts it."""
        found = self.special_ids.get("pad")
        return found if found is not None else self.eos_id or 0

    def encode_texts(self, examples: Sequence[Example]) -> list[Encoded]:
        """Returns texts, and prompts with their completions, which alone are trained; the end token after each."""
        found: dict[int, Encoded] = {}
        for begins in (True, False):
            some = [index for index, example in enumerate(examples) if example.begins == begins]
            texts = [(examples[index].prompt or "") + (examples[index].text or "") for index in some]
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=begins)
            for index, encoding in zip(some, encodings, strict=True):
                found[index] = self._with_end(examples[index], encoding)
        return [found[index] for index in range(len(examples))]

    def _with_end(self, example: Example, encoding: Encoding) -> Encoded:
        ids = list(encoding.ids)
        trained = np.ones(len(ids), np.bool_)
        if example.prompt is not None:
            start, count = len(example.prompt), len(example.text or "")
            trained = _overlapping(encoding.offsets, [(start, start + count)])
        if example.ends and self.eos_id is not None:
            if ids[-1:] != [self.eos_id]:
                ids.append(self.eos_id)
                trained = np.append(trained, False)
            trained[-1] = True
        return Encoded(np.array(ids, np.int32), trained)

    def messages_of(self, example: Example) -> list[Message]:
        """Returns the messages of a conversation, the default system prompt before them; none of a text."""
        messages = list(example.messages or ())
        if messages and self.system_prompt is not None and messages[0]["role"] not in _SYSTEM:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def rendered_example(self, example: Example) -> Rendered | None:
        """Returns the text of a conversation with its trained ranges; None for what is no conversation.

        Raises:
            DataError: there is no template, or it fails.
        """
        if example.messages is None:
            return None
        return self.rendered(self.messages_of(example), example.tools)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Returns the text of messages and the ranges in it that are trained."""
        text, ranges = self._required_template().answers(messages, tools)
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            # Such a template leaves an empty answer, which would be trained.
            if call["function"]["name"] not in text:
                raise DataError(
                    f"{self.template_name} does not show calls of tools, such as that of "
                    f"{call['function']['name']!r}. {REMEDY}"
                )
        found = sum(span is not None for span in ranges)
        return Rendered(text, self._chosen(messages, ranges), found)

    def _chosen(self, messages: Sequence[Message], ranges: Sequence[Range | None]) -> list[Range]:
        """Those of ``ranges`` that are trained."""
        answers = [message for message in messages if message["role"] == ASSISTANT]
        weighed = any(message.get("weight", 1) == 0 for message in answers)
        if weighed and len(ranges) != len(answers):
            raise DataError(
                f"{self.template_name} marks {len(ranges)} of {len(answers)} answers, so that it is not known which of "
                f"them have the weight 0. {REMEDY}"
            )
        wanted = [not weighed or message.get("weight", 1) != 0 for message in answers]
        if len(ranges) != len(answers):
            wanted = [True] * len(ranges)
        if self.train_on == "last":
            wanted = [keep and index == len(wanted) - 1 for index, keep in enumerate(wanted)]
        return [span for span, keep in zip(ranges, wanted, strict=True) if keep and span is not None]

    def encode_rendered(self, chats: Sequence[Rendered]) -> list[Encoded]:
        """Returns rendered conversations with only their ranges trained, each cut after the last of them."""
        encodings = self.tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [
            # What follows the last trained token teaches nothing and would only fill the sequence.
            Encoded(np.array(encoding.ids, np.int32), _overlapping(encoding.offsets, chat.ranges)).cut(
                len(encoding.ids)
            )
            for encoding, chat in zip(encodings, chats, strict=True)
        ]

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> IntArray:
        """Returns int32 tokens of ``messages`` with the start of the assistant's answer after them."""
        text = self._required_template().render(messages, add_generation_prompt=True, tools=tools)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def special_strings(self) -> list[str]:
        """Returns the texts that the tokenizer turns into special tokens wherever they stand."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def _required_template(self) -> ChatTemplate:
        if self.template is None:
            raise DataError(
                "the model has no chat template, which conversations need; choose one with data.chat_template=chatml "
                '(or llama3, mistral, qwen, gemma, or a .jinja file), or give data of {"text": …} or {"prompt": …, '
                '"completion": …}'
            )
        return self.template


def decoded_spans(example: Encoded, coder: Coder | None) -> list[tuple[str, bool]]:
    """Returns the text of ``example`` in pieces of trained and untrained tokens; numbers without a tokenizer."""
    borders = np.flatnonzero(np.diff(example.trained.astype(np.int8))) + 1
    pieces = zip(np.split(example.tokens, borders), np.split(example.trained, borders), strict=True)
    return [(_decoded(tokens.tolist(), coder), bool(trained[0])) for tokens, trained in pieces]


def _decoded(tokens: list[int], coder: Coder | None) -> str:
    if coder is None:
        return " ".join(map(str, tokens)) + " "
    return str(coder.tokenizer.decode(tokens, skip_special_tokens=False))


def _overlapping(offsets: Sequence[Range], ranges: Sequence[Range]) -> BoolArray:
    """Which tokens have a character in one of ``ranges``, as transformers marks them; bool [tokens]."""
    marked = np.zeros(len(offsets), np.bool_)
    if ranges and offsets:
        bounds = np.array(offsets, np.int64)
        for start, end in ranges:
            marked |= (bounds[:, 1] > start) & (bounds[:, 0] < end)
    return marked
