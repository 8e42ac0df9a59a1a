# SPDX-License-Identifier: Apache-2.0
"""From a source of examples to packed training and held-out sequences, with nothing left out silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memascend_jax.data.collect import collect
from memascend_jax.data.collection import Collection, Counts, Question
from memascend_jax.data.examples import ExampleBuilder, Examples
from memascend_jax.data.jsonl import Example, read_examples
from memascend_jax.data.packing import PackedExamples, pack
from memascend_jax.data.pydocs import read_pairs
from memascend_jax.data.random_tokens import RANDOM_HELD_OUT, full_counts, random_sequences
from memascend_jax.data.tokenize import Coder, decoded_spans
from memascend_jax.errors import DataError
from memascend_jax.observe.example import Preview
from memascend_jax.units import counted

_COUNTED = (
    ("examples kept", "kept"),
    ("examples cut", "cut"),
    ("examples dropped, too long", "dropped"),
    ("examples empty, nothing to train", "empty"),
    ("tokens", "tokens"),
    ("tokens trained", "trained_tokens"),
    ("tokens cut off", "tokens_cut"),
)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training and held-out sequences, what became of the examples, and questions to show answers to.

    ``held_out`` is None when nothing is held out. ``questions`` are held out where anything is. ``notes`` are
    sentences that a user should see.
    """

    train: PackedExamples
    held_out: PackedExamples | None
    counts: Counts
    held_out_counts: Counts
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        """Sequences that are held in memory, held-out ones included."""
        return len(self.train) + (len(self.held_out) if self.held_out else 0)

    def preview(self, coder: Coder | None) -> Preview:
        """Returns what became of the examples, and the first of the training data as text."""
        rows = [
            (what, f"{getattr(self.counts, key):,}", f"{getattr(self.held_out_counts, key):,}")
            for what, key in _COUNTED
        ]
        held_out = self.held_out
        rows.append(("sequences", f"{len(self.train):,}", f"{len(held_out) if held_out else 0:,}"))
        return Preview(decoded_spans(self.train.members(0)[0], coder), rows, self.notes)


def build_dataset(
    *,
    source: str,
    coder: Coder | None,
    vocab_size: int,
    seq_len: int,
    eval_source: str | None = None,
    eval_fraction: float = 0.1,
    eval_sequences: int | None = None,
    too_long: str = "cut",
    seed: int = 0,
) -> Dataset:
    """Returns the packed data of ``source``.

    Args:
        source: ``pydocs``, ``random``, or the path of a JSONL file.
        coder: the model's tokenizer and template; None only for random data.
        vocab_size: of the model; a token beyond it is refused.
        seq_len: places of a sequence, tokens.
        eval_source: path of a JSONL file that is held out instead of a part of ``source``.
        eval_fraction: share of the distinct examples that is held out.
        eval_sequences: most held-out sequences that are kept; None: all.
        too_long: ``cut`` or ``drop``.
        seed: of random data and of the packing.

    Raises:
        DataError: the source is missing, malformed or empty, or no token of it is trained.
    """
    if source == "random":
        apart = (eval_sequences or RANDOM_HELD_OUT) if eval_fraction else 0
        train, rest = random_sequences(vocab_size, seq_len, apart, seed)
        full, full_rest = full_counts(len(train), seq_len), full_counts(len(rest), seq_len)
        return Dataset(train, rest if apart else None, full, full_rest)
    if coder is None:
        raise DataError(f"data.source={source} needs a tokenizer, which this model has not; use random data")
    builder = ExampleBuilder()
    main = collect(_examples(source), coder, builder, seq_len=seq_len, too_long=too_long)
    if eval_source is None:
        other, held = main, main.held_out(eval_fraction)
        kept = ~held
    else:
        other = collect(_examples(eval_source), coder, builder, seq_len=seq_len, too_long=too_long)
        kept, held = np.ones(len(main.ranks), np.bool_), np.ones(len(other.ranks), np.bool_)
    counts, held_out_counts = main.counts(kept), other.counts(held)
    _check_trained(source, counts, seq_len)
    if eval_source is not None:
        _check_trained(eval_source, held_out_counts, seq_len)
    examples = builder.finish()
    _check_vocabulary(examples, vocab_size)
    held_out = pack(examples, other.numbers(held), seq_len, pad_id=coder.pad_id, seed=seed)
    return Dataset(
        train=pack(examples, main.numbers(kept), seq_len, pad_id=coder.pad_id, seed=seed),
        held_out=held_out.first(eval_sequences) if len(held_out) else None,
        counts=counts,
        held_out_counts=held_out_counts,
        questions=tuple(question for _, question in other.questions),
        notes=tuple(_notes(main, other, eval_fraction, len(held_out))),
    )


def _examples(source: str) -> Iterator[Example]:
    if source == "pydocs":
        for pair in read_pairs():
            asked = {"role": "user", "content": pair.question}
            answered = {"role": "assistant", "content": pair.answer}
            yield Example(pair.name, messages=[asked, answered])
    else:
        yield from read_examples(Path(source).expanduser())


def _check_trained(source: str, counts: Counts, seq_len: int) -> None:
    if counts.trained_tokens:
        return
    raise DataError(
        f"no token of data.source={source} would be trained: {counted(counts.dropped, 'example is', 'examples are')}"
        f" longer than data.seq_len={seq_len}, {counts.empty:,} without an answer of the assistant; raise"
        " data.seq_len, or give messages with the role 'assistant'"
    )


def _check_vocabulary(examples: Examples, vocab_size: int) -> None:
    largest = int(examples.tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer gave token {largest}, but the model's vocabulary has {vocab_size} tokens; the"
            " tokenizer is another model's"
        )


def _notes(main: Collection, other: Collection, eval_fraction: float, held_out: int) -> Iterator[str]:
    special = main.with_special_text + (other.with_special_text if other is not main else 0)
    if special:
        yield (
            f"{counted(special, 'example contains', 'examples contain')} the text of special tokens, such as"
            " an end of turn, which the model reads as such"
        )
    not_found = main.answers_not_found + (other.answers_not_found if other is not main else 0)
    if not_found:
        yield (
            f"{counted(not_found, 'answer is', 'answers are')} not trained: the chat template writes"
            " them otherwise, or not at all, once more messages follow"
        )
    if eval_fraction and not held_out:
        yield "nothing is held out: the data has only one distinct example"
