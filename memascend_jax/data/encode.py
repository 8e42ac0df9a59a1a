# SPDX-License-Identifier: Apache-2.0
"""A block's examples as tokens, with all that is known of them before anything is cut or held out."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memascend_jax.data.collection import Question
from memascend_jax.data.examples import Encoded, ExampleBuilder, Examples
from memascend_jax.data.messages import ASSISTANT
from memascend_jax.data.records import Example
from memascend_jax.data.source import Block, Fault
from memascend_jax.data.tokenize import Coder, Rendered
from memascend_jax.errors import DataError

#: Examples, and characters of them, tokenized at once: enough for the tokenizer's threads, little memory.
_GROUP = 256
_GROUP_CHARACTERS = 1 << 19
#: Of what is kept in caches; another one when the same record gives other tokens than before.
_VERSION = 1
#: Questions that are kept of a block: more are never shown.
QUESTIONS = 16


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The examples of a block, in order.

    Attributes:
        examples: their tokens, uncut.
        ranks: uint64, by content: equal examples have equal ranks.
        is_text: whether each is a text that may be cut into sequences.
        kinds: records by kind.
        questions: those of the smallest ranks, with their rank.
        special: whether somebody writes a special token in it.
        not_found: answers of each that the template does not show as they are; int32.
    """

    examples: Examples
    ranks: npt.NDArray[np.uint64]
    is_text: npt.NDArray[np.bool_]
    special: npt.NDArray[np.bool_]
    not_found: npt.NDArray[np.int32]
    kinds: Counter[str] = field(default_factory=Counter)
    questions: list[tuple[int, Question]] = field(default_factory=list)
    faults: Sequence[Fault] = ()

    def __len__(self) -> int:
        return len(self.ranks)


class Encoder:
    """Makes tokens of blocks.

    Args:
        kind: of the records, as ``data.kind`` has it.
    """

    def __init__(self, coder: Coder, kind: str) -> None:
        self.coder, self.kind = coder, kind
        self._digest: str | None = None
        self._special = re.compile("|".join(map(re.escape, coder.special_strings())) or r"(?!)")

    def digest(self) -> str:
        """Returns a SHA-256, in hex, of all but the block that decides what ``encode`` returns."""
        if self._digest is None:
            text = f"{_VERSION};{self.kind};{self.coder.digest()}"
            self._digest = hashlib.sha256(text.encode()).hexdigest()
        return self._digest

    def encode(self, block: Block) -> EncodedBlock:
        """Returns the block's examples; what is no example is in its faults.

        Raises:
            DataError: the chat template fails for one of them.
        """
        builder, ranks, is_text = ExampleBuilder(), list[int](), list[bool]()
        faults: list[Fault] = []
        kinds: Counter[str] = Counter()
        questions: list[tuple[int, Question]] = []
        special, not_found = list[bool](), list[int]()
        for group in self._groups(block, faults):
            rendered = [self._rendered(example) for example in group]
            for example, chat in zip(group, rendered, strict=True):
                answers = sum(message["role"] == ASSISTANT for message in example.messages or ())
                not_found.append(max(0, answers - chat.answers) if chat is not None else 0)
            for example, encoded in zip(group, self._encoded(group, rendered), strict=True):
                rank = int.from_bytes(hashlib.sha256(example.key.encode()).digest()[:8], "big")
                builder.add(encoded)
                ranks.append(rank)
                is_text.append(example.text is not None and example.prompt is None)
                kinds[example.kind] += 1
                special.append(any(self._special.search(text) for text in example.texts()))
                question = self._question(example) if encoded.trained_tokens else None
                if question is not None:
                    remember(questions, rank, question)
        return EncodedBlock(
            builder.finish(),
            np.array(ranks, np.uint64),
            np.array(is_text, np.bool_),
            np.array(special, np.bool_),
            np.array(not_found, np.int32),
            kinds,
            questions,
            faults,
        )

    def _groups(self, block: Block, faults: list[Fault]) -> Iterator[list[Example]]:
        group: list[Example] = []
        characters = 0
        for item in block.items(self.kind):
            if isinstance(item, Fault):
                faults.append(item)
                continue
            group.append(item)
            characters += sum(map(len, item.texts()))
            if len(group) == _GROUP or characters > _GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
        if group:
            yield group

    def _rendered(self, example: Example) -> Rendered | None:
        try:
            return self.coder.rendered_example(example)
        except DataError as error:
            raise DataError(f"{example.where}: {error}") from error

    def _encoded(self, group: Sequence[Example], rendered: Sequence[Rendered | None]) -> Iterator[Encoded]:
        chats = iter(self.coder.encode_rendered([chat for chat in rendered if chat is not None]))
        texts = iter(self.coder.encode_texts([example for example in group if example.messages is None]))
        for chat in rendered:
            yield next(chats if chat is not None else texts)

    def _question(self, example: Example) -> Question | None:
        messages = self.coder.messages_of(example)
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers or answers[-1] == 0 or not messages[answers[-1]]["content"]:
            return None
        last = answers[-1]
        return Question(tuple(messages[:last]), messages[last]["content"], example.tools)


def remember(questions: list[tuple[int, Question]], rank: int, question: Question) -> None:
    """Keeps the questions with the smallest ranks: those that are held out first."""
    if len(questions) == QUESTIONS and rank >= questions[-1][0]:
        return
    questions.append((rank, question))
    questions.sort(key=lambda item: item[0])
    del questions[QUESTIONS:]
