# SPDX-License-Identifier: Apache-2.0
"""The sequences that a run trains on, by their place: sequence 0, 1, 2, … over all epochs.

What stands at a place is a function of the data and the seed alone. So a run that goes on needs only how many sequences
it has read; a stream, whose places cannot be computed without reading what is before them, is told a little more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memascend_jax.data.batches import BatchOrder
from memascend_jax.data.examples import Encoded, Examples
from memascend_jax.data.packing import Microbatch, PackedExamples, pack, padding
from memascend_jax.errors import DataError

#: Sequences of which a mixture has exactly its shares, up to one sequence for each source.
PERIOD = 4096

Position = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Packing:
    """How examples become sequences: see the keys of ``data`` with these names."""

    seq_len: int
    pad_id: int
    too_long: str = "cut"
    together: bool = True
    by_length: bool = False
    micro_batch_size: int = 1
    seed: int = 0

    def packed(self, examples: Examples, numbers: Sequence[int], seed: int | None = None) -> PackedExamples:
        """Returns sequences of the examples of ``numbers``."""
        return pack(
            examples,
            numbers,
            self.seq_len,
            pad_id=self.pad_id,
            seed=self.seed if seed is None else seed,
            together=self.together,
        )

    def order(self, packed: PackedExamples, seed: int | None = None) -> BatchOrder:
        """Returns the order in which sequences are trained on."""
        return BatchOrder(
            len(packed),
            self.seed if seed is None else seed,
            packed.places() if self.by_length else None,
            self.micro_batch_size,
        )


class TrainingSequences(Protocol):
    """Sequences by place, from 0 without an end.

    Attributes:
        per_epoch: sequences of a pass over the data; None: nobody knows before it is over.
        held: sequences that are in memory.
    """

    @property
    def seq_len(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def per_epoch(self) -> int | None: ...

    @property
    def held(self) -> int: ...

    def fill(self, batch: Microbatch, row: int, place: int) -> None:
        """Writes the sequence at ``place`` over the padding in a row."""

    def first_example(self) -> Encoded:
        """Returns an example to show."""

    def position(self, place: int) -> Position:
        """Returns what is needed to go on at ``place``; nothing before it is asked for again."""

    def check_position(self) -> None:
        """Raises ``DataError`` when what is at the position given is not what was there."""

    def digests(self) -> Mapping[str, str]:
        """Returns digests of the contents, by source; a single one under the name ``""``."""

    def close(self) -> None:
        """Stops what is done beside the training."""


def batches_at(
    sequences: TrainingSequences, first: int, micro_batches: int, micro_batch_size: int
) -> list[Microbatch]:
    """Returns the micro-batches that begin at place ``first``; the same sequences however they are split."""
    batches = []
    for index in range(micro_batches):
        batch = padding(micro_batch_size, sequences.seq_len, sequences.pad_id)
        for row in range(micro_batch_size):
            sequences.fill(batch, row, first + index * micro_batch_size + row)
        batches.append(batch)
    return batches


@dataclass(slots=True)
class OrderedSequences:
    """Sequences in memory, each epoch in an order of its own."""

    packed: PackedExamples
    order: BatchOrder

    @property
    def seq_len(self) -> int:
        return self.packed.seq_len

    @property
    def pad_id(self) -> int:
        return self.packed.pad_id

    @property
    def per_epoch(self) -> int:
        return len(self.packed)

    @property
    def held(self) -> int:
        return len(self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def fill(self, batch: Microbatch, row: int, place: int) -> None:
        """Writes the sequence at ``place`` over the padding in a row."""
        self.packed.fill(batch, row, int(self.order.take(place, 1)[0]))

    def first_example(self) -> Encoded:
        """Returns the first example."""
        return self.packed.members(0)[0]

    def position(self, place: int) -> Position:
        """Returns nothing: the place says all."""
        return {}

    def check_position(self) -> None:
        """Returns: there is nothing to check."""

    def digests(self) -> Mapping[str, str]:
        """Returns the digest of all tokens."""
        return {"": self.packed.digest()}

    def close(self) -> None:
        """Does nothing."""


@dataclass(slots=True)
class Mixture:
    """Sequences of several sources, each with its share; a source that ends begins its next epoch.

    Which source a place belongs to is drawn for ``PERIOD`` places at a time, in which each source has its share.

    Raises:
        DataError: a share is too small to be had.
    """

    names: Sequence[str]
    parts: Sequence[TrainingSequences]
    weights: Sequence[float]
    seed: int
    _counts: npt.NDArray[np.int64] = field(init=False, repr=False)
    _drawn: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._counts = shares(self.weights, PERIOD)
        for name, count in zip(self.names, self._counts, strict=True):
            if not count:
                raise DataError(
                    f"the weight of '{name}' in data.sources is less than 1 in {PERIOD:,} of all; raise it, or leave "
                    "the source out"
                )

    @property
    def seq_len(self) -> int:
        return self.parts[0].seq_len

    @property
    def pad_id(self) -> int:
        return self.parts[0].pad_id

    @property
    def per_epoch(self) -> int | None:
        """As many as all sources have together, whatever their shares."""
        counts = [part.per_epoch for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def held(self) -> int:
        return sum(part.held for part in self.parts)

    def fill(self, batch: Microbatch, row: int, place: int) -> None:
        """Writes the sequence at ``place`` over the padding in a row."""
        period, within = divmod(place, PERIOD)
        sources, before = self._period(period)
        source = int(sources[within])
        count = period * int(self._counts[source]) + int(before[within])
        self.parts[source].fill(batch, row, count)

    def first_example(self) -> Encoded:
        """Returns the first example of the first source."""
        return self.parts[0].first_example()

    def position(self, place: int) -> Position:
        """Returns the position of each source that has one."""
        period, within = divmod(place, PERIOD)
        sources, _ = self._period(period)
        found = {}
        for index, part in enumerate(self.parts):
            count = period * int(self._counts[index]) + int((sources[:within] == index).sum())
            position = part.position(count)
            if position:
                found[str(index)] = position
        return found

    def check_position(self) -> None:
        """Raises ``DataError`` when a source is not what it was."""
        for part in self.parts:
            part.check_position()

    def digests(self) -> Mapping[str, str]:
        """Returns the digest of each source with its share, by name, and under ``""`` that of all."""
        found = [
            hashlib.sha256(f"{count};{part.digests()['']}".encode()).hexdigest()
            for part, count in zip(self.parts, self._counts, strict=True)
        ]
        together = hashlib.sha256(";".join(found).encode()).hexdigest()
        return {"": together, **dict(zip(self.names, found, strict=True))}

    def close(self) -> None:
        """Closes all of them."""
        for part in self.parts:
            part.close()

    def _period(self, period: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source of each place of a period, and how many places of that source are before it."""
        if period not in self._drawn:
            for old in [drawn for drawn in self._drawn if drawn < period - 1]:
                del self._drawn[old]
            generator = np.random.Generator(np.random.Philox(key=[self.seed, (0x6D6978 << 40) + period]))
            sources = generator.permutation(np.repeat(np.arange(len(self.parts)), self._counts))
            before = np.zeros(PERIOD, np.int64)
            for index in range(len(self.parts)):
                chosen = sources == index
                before[chosen] = np.arange(int(chosen.sum()))
            self._drawn[period] = (sources, before)
        return self._drawn[period]


def shares(weights: Sequence[float], total: int) -> npt.NDArray[np.int64]:
    """Returns how many of ``total`` each weight gets: rounded down, the rest to those that lose most by it."""
    exact = np.array(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    return counts
