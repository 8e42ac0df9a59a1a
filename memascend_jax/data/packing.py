# SPDX-License-Identifier: Apache-2.0
"""Examples put into sequences of one length, each example visible only to itself; several into one, or one each.

An example of n tokens gives n - 1 pairs (token, next token) and takes n - 1 places: its last token is only ever a
label. The arrays of a batch are made when it is asked for.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memascend_jax.data.examples import Encoded, Examples, IntArray, Numbers

#: Sequences that wait for a fitting example. More fill better, fewer keep the drawn order.
_OPEN_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What a stage reads, arrays [batch, seq_len]: int32 ``tokens``, ``labels`` (the next token), ``segments``
    (1, 2, … by example, 0: padding), ``positions`` (from 0 in each example); float32 ``weights``, 1 where the
    label is trained, else 0.
    """

    tokens: IntArray
    labels: IntArray
    weights: npt.NDArray[np.float32]
    segments: IntArray
    positions: IntArray

    @property
    def trained_tokens(self) -> int:
        """The number of labels that the loss counts."""
        return int(np.count_nonzero(self.weights))


@dataclass(frozen=True, slots=True)
class PackedExamples:
    """Sequences by index: sequence i holds the examples ``numbers[starts[i]:starts[i + 1]]``."""

    seq_len: int
    pad_id: int
    examples: Examples
    numbers: IntArray
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def first(self, count: int | None) -> PackedExamples:
        """Returns the first ``count`` sequences (None: all) over the same memory."""
        kept = len(self) if count is None else min(count, len(self))
        return PackedExamples(self.seq_len, self.pad_id, self.examples, self.numbers, self.starts[: kept + 1])

    def batch(self, indices: Sequence[int] | Numbers) -> Microbatch:
        """Returns new arrays with the sequences of ``indices``, one row each."""
        batch = padding(len(indices), self.seq_len, self.pad_id)
        for row, index in enumerate(indices):
            self.fill(batch, row, int(index))
        return batch

    def members(self, index: int) -> list[Encoded]:
        """Returns the examples of one sequence, in their order."""
        return [self.examples[int(n)] for n in self.numbers[self.starts[index] : self.starts[index + 1]]]

    def trained_tokens(self, indices: Sequence[int] | Numbers | None = None) -> int:
        """Returns how many labels the loss counts in the sequences of ``indices`` (None: all)."""
        chosen = range(len(self)) if indices is None else indices
        return sum(example.trained_tokens for index in chosen for example in self.members(int(index)))

    def places_used(self) -> int:
        """Returns how many places of all sequences hold a token; the rest is padding."""
        return sum(len(example.tokens) - 1 for index in range(len(self)) for example in self.members(index))

    def places(self) -> npt.NDArray[np.int64]:
        """Returns how many places of each sequence hold a token, int64 [sequences]."""
        used = np.concatenate([[0], np.cumsum(self.examples.lengths()[self.numbers] - 1)])
        return np.diff(used[self.starts])

    def digest(self) -> str:
        """Returns a SHA-256, in hex, of what the sequences hold and of which tokens are trained, in their order."""
        digest = hashlib.sha256(np.diff(self.starts).astype("<i4").tobytes())
        for number in self.numbers[: self.starts[-1]].tolist():
            example = self.examples[number]
            digest.update(f"{len(example.tokens)};".encode())
            digest.update(example.tokens.astype("<i4", copy=False).tobytes())
            digest.update(example.trained.tobytes())
        return digest.hexdigest()

    def fill(self, batch: Microbatch, row: int, index: int) -> None:
        """Writes sequence ``index`` over the padding in one row of ``batch``."""
        begin = 0
        for segment, example in enumerate(self.members(index), start=1):
            places = slice(begin, begin + len(example.tokens) - 1)
            batch.tokens[row, places] = example.tokens[:-1]
            batch.labels[row, places] = example.tokens[1:]
            batch.weights[row, places] = example.trained[1:]
            batch.segments[row, places] = segment
            batch.positions[row, places] = np.arange(len(example.tokens) - 1)
            begin = places.stop


def padding(rows: int, seq_len: int, pad_id: int) -> Microbatch:
    """Returns new arrays in which nothing is but padding."""
    shape = (rows, seq_len)
    return Microbatch(
        tokens=np.full(shape, pad_id, np.int32),
        labels=np.full(shape, pad_id, np.int32),
        weights=np.zeros(shape, np.float32),
        segments=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
    )


def pack(
    examples: Examples,
    numbers: Sequence[int],
    seq_len: int,
    *,
    pad_id: int,
    seed: int,
    together: bool = True,
) -> PackedExamples:
    """Returns the examples of ``numbers``, each of 2 to ``seq_len + 1`` tokens, in an order drawn from ``seed``.

    Args:
        together: as many as there is room for in a sequence; else one in each.
    """
    drawn = np.random.Generator(np.random.Philox(key=[seed, 0x7061636B])).permutation(
        np.array(numbers, np.int32)
    )
    sequences = (
        _best_fit(drawn.tolist(), (examples.lengths() - 1).tolist(), seq_len)
        if together
        else [[number] for number in drawn.tolist()]
    )
    return PackedExamples(
        seq_len=seq_len,
        pad_id=pad_id,
        examples=examples,
        numbers=np.array([number for sequence in sequences for number in sequence], np.int32),
        starts=np.cumsum([0, *map(len, sequences)], dtype=np.int32),
    )


def _best_fit(order: Sequence[int], places: Sequence[int], seq_len: int) -> list[list[int]]:
    """Puts each example into the fullest open sequence that has room for it."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, sequence), the fullest first
    for number in order:
        needed = places[number]
        at = bisect_left(room, (needed, -1))
        if at < len(room):
            free, sequence = room.pop(at)
        else:
            free, sequence = seq_len, len(sequences)
            sequences.append([])
        sequences[sequence].append(number)
        if free > needed:
            insort(room, (free - needed, sequence))
        if len(room) > _OPEN_SEQUENCES:
            room.pop(0)
    return sequences
