# SPDX-License-Identifier: Apache-2.0
"""Encodes the examples of a source and sorts them out: kept, cut, dropped or empty."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from memascend_jax.data.collection import Collection, Outcome, Question
from memascend_jax.data.examples import Encoded, ExampleBuilder
from memascend_jax.data.jsonl import Example
from memascend_jax.data.tokenize import Coder, Rendered
from memascend_jax.errors import DataError

#: Examples tokenized at once: enough for the tokenizer's threads, little memory.
_CHUNK = 256
_QUESTIONS = 16


def collect(
    examples: Iterable[Example], coder: Coder, builder: ExampleBuilder, *, seq_len: int, too_long: str
) -> Collection:
    """Returns the collection of ``examples``, whose tokens are added to ``builder``."""
    collection = Collection(builder)
    special = re.compile("|".join(map(re.escape, coder.special_strings())) or r"(?!)")
    iterator = iter(examples)
    while chunk := list(islice(iterator, _CHUNK)):
        chats = _rendered(chunk, coder)
        for example, (_, ranges) in chats:
            answers = sum(message["role"] == "assistant" for message in example.messages or ())
            collection.answers_not_found += max(0, answers - len(ranges))
        for example, encoded in zip(chunk, _encode(chunk, chats, coder), strict=True):
            rank = int.from_bytes(hashlib.sha256(example.key.encode()).digest()[:8], "big")
            outcome, pieces = _sorted_out(encoded, example.text is not None, seq_len, too_long)
            numbers = [builder.add(piece) for piece in pieces]
            used, spent = sum(len(piece.tokens) for piece in pieces), len(pieces) - 1
            collection.ranks.append(rank)
            collection.outcomes.append(outcome)
            collection.first.append(numbers[0] if numbers else 0)
            collection.pieces.append(len(pieces))
            collection.tokens.append(used)
            collection.trained.append(sum(piece.trained_tokens for piece in pieces))
            # Neighbouring pieces share a token: the last label of one is the first input of the next.
            collection.tokens_cut.append(len(encoded.tokens) - (used - spent) if pieces else 0)
            collection.with_special_text += any(special.search(text) for text in _texts(example))
            if numbers:
                _remember(collection.questions, rank, example)
    return collection


def _rendered(chunk: Sequence[Example], coder: Coder) -> list[tuple[Example, Rendered]]:
    chats = []
    for example in chunk:
        if example.messages is not None:
            try:
                chats.append((example, coder.rendered(example.messages)))
            except DataError as error:
                raise DataError(f"{example.where}: {error}") from error
    return chats


def _encode(
    chunk: Sequence[Example], chats: Sequence[tuple[Example, Rendered]], coder: Coder
) -> Iterator[Encoded]:
    encoded = iter(coder.encode_rendered([rendered for _, rendered in chats]))
    for example in chunk:
        yield next(encoded) if example.messages is not None else coder.encode_text(example.text or "")


def _sorted_out(
    encoded: Encoded, is_text: bool, seq_len: int, too_long: str
) -> tuple[Outcome, list[Encoded]]:
    # A sequence of seq_len places takes seq_len + 1 tokens: the last is only a label.
    longest = seq_len + 1
    if not encoded.trained_tokens:
        return Outcome.EMPTY, []
    if len(encoded.tokens) <= longest:
        return Outcome.KEPT, [encoded]
    if too_long == "drop":
        return Outcome.DROPPED, []
    if is_text:
        starts = range(0, len(encoded.tokens) - 1, seq_len)
        spans = [slice(start, start + longest) for start in starts]
        return Outcome.CUT, [Encoded(encoded.tokens[span], encoded.trained[span]) for span in spans]
    beginning = encoded.cut(longest)
    return (Outcome.CUT, [beginning]) if beginning.trained_tokens else (Outcome.DROPPED, [])


def _texts(example: Example) -> Iterator[str]:
    if example.text is not None:
        yield example.text
    yield from (message["content"] for message in example.messages or ())


def _remember(questions: list[tuple[int, Question]], rank: int, example: Example) -> None:
    """Keeps the questions with the smallest ranks: those that are held out first."""
    messages = example.messages or []
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] == 0:
        return
    questions.append((rank, Question(tuple(messages[: answers[-1]]), messages[answers[-1]]["content"])))
    questions.sort(key=lambda item: item[0])
    del questions[_QUESTIONS:]
