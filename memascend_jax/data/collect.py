# SPDX-License-Identifier: Apache-2.0
"""Examples of one source, encoded and sorted out: kept, cut, dropped or empty, and each with its place in the split."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.data.examples import Encoded, ExampleBuilder
from memascend_jax.data.jsonl import Example
from memascend_jax.data.tokenize import Coder
from memascend_jax.errors import DataError

#: Examples tokenized at once: enough for the tokenizer's threads, little memory.
_CHUNK = 256
_QUESTIONS = 16


class Outcome(IntEnum):
    """What became of an example."""

    KEPT = 0
    CUT = 1
    DROPPED = 2
    EMPTY = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Examples by outcome, and the tokens of those that are used; ``tokens_cut`` were cut off."""

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    empty: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_cut: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """The messages before an answer, and the answer the data gives."""

    messages: tuple[dict[str, Any], ...]
    answer: str


@dataclass(slots=True)
class Collection:
    """All examples of a source, by their order: rank in the split, outcome, and where their tokens are.

    An example that was cut into several pieces has several numbers in the builder, from ``first`` on.
    """

    builder: ExampleBuilder
    ranks: array[int] = field(default_factory=lambda: array("Q"))
    outcomes: array[int] = field(default_factory=lambda: array("B"))
    first: array[int] = field(default_factory=lambda: array("i"))
    pieces: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    trained: array[int] = field(default_factory=lambda: array("q"))
    tokens_cut: array[int] = field(default_factory=lambda: array("q"))
    questions: list[tuple[int, Question]] = field(default_factory=list)
    with_special_text: int = 0

    def numbers(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """Returns the numbers in the builder of the chosen examples' pieces."""
        indices = np.flatnonzero(chosen)
        return [self.first[i] + piece for i in indices for piece in range(self.pieces[i])]

    def counts(self, chosen: npt.NDArray[np.bool_]) -> Counts:
        """Returns what became of the chosen examples."""
        outcomes = np.array(self.outcomes, np.uint8)[chosen]
        by_outcome = {outcome.name.lower(): int((outcomes == outcome).sum()) for outcome in Outcome}
        return Counts(
            **by_outcome,
            tokens=int(np.array(self.tokens, np.int64)[chosen].sum()),
            trained_tokens=int(np.array(self.trained, np.int64)[chosen].sum()),
            tokens_cut=int(np.array(self.tokens_cut, np.int64)[chosen].sum()),
        )

    def held_out(self, fraction: float) -> npt.NDArray[np.bool_]:
        """Returns which examples are held out: those with the smallest ranks, equal examples on one side."""
        ranks = np.array(self.ranks, np.uint64)
        distinct = np.unique(ranks)
        count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
        if fraction == 0 or count < 1:
            return np.zeros(len(ranks), np.bool_)
        chosen: npt.NDArray[np.bool_] = ranks <= distinct[count - 1]
        return chosen


def collect(
    examples: Iterable[Example], coder: Coder, builder: ExampleBuilder, *, seq_len: int, too_long: str
) -> Collection:
    """Returns the collection of ``examples``, whose tokens are added to ``builder``."""
    collection = Collection(builder)
    special = re.compile("|".join(map(re.escape, coder.special_strings())) or r"(?!)")
    iterator = iter(examples)
    while chunk := list(islice(iterator, _CHUNK)):
        for example, encoded in zip(chunk, _encode(chunk, coder), strict=True):
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


def _encode(chunk: Sequence[Example], coder: Coder) -> Iterator[Encoded]:
    chats = []
    for example in chunk:
        if example.messages is not None:
            try:
                chats.append(coder.rendered(example.messages))
            except DataError as error:
                raise DataError(f"{example.where}: {error}") from error
    encoded = iter(coder.encode_rendered(chats))
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
