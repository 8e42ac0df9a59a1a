# SPDX-License-Identifier: Apache-2.0
"""Examples to tokens, each token marked as trained or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from memascend_jax.data.chat import ChatTemplate, Message, Range
from memascend_jax.data.examples import Encoded, IntArray
from memascend_jax.errors import DataError

#: A conversation as text, and the character ranges in it that the assistant says.
Rendered = tuple[str, list[Range]]


@dataclass(slots=True)
class Coder:
    """A model's tokenizer, chat template and special tokens.

    Args:
        tokenizer: of the model.
        chat_template: jinja2 source, or None for a model that does not chat.
        special_ids: by the names ``bos``, ``eos``, ``pad``, ``unk``; absent or None where the model has none.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special_ids: Mapping[str, int | None] = field(default_factory=dict)
    template: ChatTemplate | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            named = {
                name: self.tokenizer.id_to_token(i) for name, i in self.special_ids.items() if i is not None
            }
            tokens = {f"{name}_token": token for name, token in named.items() if token is not None}
            self.template = ChatTemplate(self.chat_template, tokens)

    @property
    def eos_id(self) -> int | None:
        return self.special_ids.get("eos")

    @property
    def pad_id(self) -> int:
        """Token that fills a sequence; nothing attends to it and no loss counts it."""
        found = self.special_ids.get("pad")
        return found if found is not None else self.eos_id or 0

    def encode_text(self, text: str) -> Encoded:
        """Returns a document, all of it trained, with the end token after it."""
        ids = list(self.tokenizer.encode(text).ids)
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return Encoded(np.array(ids, np.int32), np.ones(len(ids), np.bool_))

    def rendered(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a conversation and the ranges in it that the assistant says."""
        return self._required_template().answers(messages)

    def encode_rendered(self, chats: Sequence[Rendered]) -> list[Encoded]:
        """Returns rendered conversations with only the answers trained, each cut after the last of them."""
        encodings = self.tokenizer.encode_batch([text for text, _ in chats], add_special_tokens=False)
        return [
            _with_mask(encoding.ids, encoding.offsets, ranges)
            for encoding, (_, ranges) in zip(encodings, chats, strict=True)
        ]

    def encode_prompt(self, messages: Sequence[Message]) -> IntArray:
        """Returns int32 tokens of ``messages`` with the start of the assistant's answer after them."""
        text = self._required_template().render(messages, add_generation_prompt=True)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def special_strings(self) -> list[str]:
        """Returns the texts that the tokenizer turns into special tokens wherever they stand."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def _required_template(self) -> ChatTemplate:
        if self.template is None:
            raise DataError(
                "the model has no chat template, which data of messages needs; use a model with one"
                ' (tokenizer_config.json, chat_template.jinja) or data of {"text": …} lines'
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


def _with_mask(ids: Sequence[int], offsets: Sequence[Range], ranges: Sequence[Range]) -> Encoded:
    trained = np.zeros(len(ids), np.bool_)
    if ranges and ids:
        bounds = np.array(offsets, np.int64)
        for start, end in ranges:
            # A token that only touches the answer (it began before it) is the template's, not the model's.
            trained |= (bounds[:, 0] >= start) & (bounds[:, 1] <= end) & (bounds[:, 1] > bounds[:, 0])
    # What follows the last trained token teaches nothing and would only fill the sequence.
    return Encoded(np.array(ids, np.int32), trained).cut(len(ids))
