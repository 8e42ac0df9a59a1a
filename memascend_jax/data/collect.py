# SPDX-License-Identifier: Apache-2.0
"""Sorts the examples of a source out: kept, cut, dropped or empty; and says which records are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memascend_jax.data.collection import Collection, Counts, Outcome
from memascend_jax.data.encode import EncodedBlock, remember
from memascend_jax.data.examples import Encoded, ExampleBuilder, Examples
from memascend_jax.data.jsonl import likely
from memascend_jax.data.source import Fault
from memascend_jax.errors import DataError
from memascend_jax.units import counted

_SHOWN_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of examples, and what else is told of them: see ``Collection``."""

    counts: Counts
    kinds: Counter[str]
    with_special_text: int
    answers_not_found: int


def collect(
    blocks: Iterable[EncodedBlock],
    builder: ExampleBuilder,
    *,
    seq_len: int,
    too_long: str,
    keep: Callable[[int], bool] = lambda rank: True,
) -> Collection:
    """Returns the collection of the examples of ``blocks``, whose tokens are added to ``builder``.

    Args:
        too_long: what becomes of examples longer than ``seq_len``: ``cut``, ``cut_right``, ``cut_left`` or ``drop``.
        keep: whether an example of a rank belongs to it at all.
    """
    collection = Collection(builder)
    for block in blocks:
        kept = set[int]()
        for index, rank in enumerate(block.ranks.tolist()):
            if not keep(rank):
                continue
            encoded = block.examples[index]
            outcome, pieces = _sorted_out(encoded, bool(block.is_text[index]), seq_len, too_long)
            numbers = [builder.add(piece) for piece in pieces]
            used, spent = sum(len(piece.tokens) for piece in pieces), len(pieces) - 1
            collection.with_special_text += bool(block.special[index])
            collection.answers_not_found += int(block.not_found[index])
            collection.ranks.append(rank)
            collection.outcomes.append(outcome)
            collection.first.append(numbers[0] if numbers else 0)
            collection.pieces.append(len(pieces))
            collection.tokens.append(used)
            collection.trained.append(sum(piece.trained_tokens for piece in pieces))
            # Neighbouring pieces share a token: the last label of one is the first input of the next.
            collection.tokens_cut.append(len(encoded.tokens) - (used - spent) if pieces else 0)
            if numbers:
                kept.add(rank)
        for rank, question in block.questions:
            if rank in kept:
                remember(collection.questions, rank, question)
        collection.kinds += block.kinds
        collection.wrong += len(block.faults)
    return collection


def check_faults(name: str, faults: Sequence[Fault], records: int) -> None:
    """Returns when there are no faults.

    Args:
        records: how many records were looked at, wrong ones included.

    Raises:
        DataError: there are some; names the first of them.
    """
    if not faults:
        return
    lines = "".join(f"  {fault.where}: {fault.why}\n" for fault in faults[:_SHOWN_FAULTS])
    rest = f"  and {len(faults) - _SHOWN_FAULTS:,} more\n" if len(faults) > _SHOWN_FAULTS else ""
    none_is_json = len(faults) == records and all(fault.not_json for fault in faults)
    remedy = (
        likely(faults[0].begins)
        if none_is_json
        else "Mend them, or leave them out with data.bad_records=skip."
    )
    raise DataError(
        f"the data file '{name}' has {counted(len(faults), 'wrong record', 'wrong records')} of {records:,}:\n"
        f"{lines}{rest}{remedy}"
    )


def check_vocabulary(examples: Examples, vocab_size: int) -> None:
    """Raises ``DataError`` when a token is none of the model's."""
    largest = int(examples.tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer gave token {largest}, but the model's vocabulary has {vocab_size} tokens; the"
            " tokenizer is another model's"
        )


def nothing_trained(name: str, counts: Counts, seq_len: int) -> str:
    """Returns the sentence about data of which no token is trained."""
    return (
        f"no token of data.source={name} would be trained: {counted(counts.dropped, 'example is', 'examples are')}"
        f" longer than data.seq_len={seq_len}, {counts.empty:,} without an answer of the assistant; raise"
        " data.seq_len, or give messages with the role 'assistant'"
    )


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
    if is_text and too_long == "cut":
        starts = range(0, len(encoded.tokens) - 1, seq_len)
        spans = [slice(start, start + longest) for start in starts]
        return Outcome.CUT, [Encoded(encoded.tokens[span], encoded.trained[span]) for span in spans]
    if too_long == "cut_left":
        rest = Encoded(encoded.tokens[-longest:], encoded.trained[-longest:])
    else:
        rest = encoded.cut(longest)
    return (Outcome.CUT, [rest]) if rest.trained_tokens else (Outcome.DROPPED, [])
