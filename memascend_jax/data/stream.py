# SPDX-License-Identifier: Apache-2.0
"""Sequences of a source that is larger than memory: read, tokenized and packed chunk by chunk beside the training.

A chunk (``data/chunks.py``) is made whole and is a function of the data, the seed and its number; while it is trained
on a thread makes the next one. So two or three chunks are in memory, whatever the size of the source, the first step
waits for one chunk only, and a run goes on with the number of the chunk in which it stopped and of the sequence in it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from memascend_jax.data.chunks import ChunkOrder, seed_of_chunk
from memascend_jax.data.collect import Collected, check_vocabulary, collect, nothing_trained
from memascend_jax.data.collection import Counts, rank_below
from memascend_jax.data.examples import Encoded, ExampleBuilder
from memascend_jax.data.packing import Microbatch, PackedExamples
from memascend_jax.data.reading import Reader
from memascend_jax.data.sequences import Packing, Position
from memascend_jax.errors import DataError

#: Bytes of memory that a stream takes, counted in the plan: "Ten gigabytes of JSONL" in docs/experiment_log.md.
STREAM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """The sequences of a chunk from place ``first`` on, in the order of training; ``digest`` of all of them."""

    number: int
    first: int
    packed: PackedExamples
    order: Sequence[int]
    digest: str
    collected: Collected

    @property
    def end(self) -> int:
        return self.first + len(self.order)


class StreamedSequences:
    """Sequences of a source by place, made as they are asked for.

    Places are asked for in order, but for those of the last two steps; ``position`` lets go of what is before it.

    Args:
        held_out: the share of examples that is not trained on, by content.
        vocab_size: a token beyond it is refused.
        position: what an earlier run's ``position`` returned; None: it begins, after ``read`` other sequences.
    """

    def __init__(
        self,
        reader: Reader,
        packing: Packing,
        *,
        vocab_size: int,
        held_out: float = 0.0,
        position: Mapping[str, Any] | None = None,
        read: int = 0,
    ) -> None:
        self._reader, self._packing, self._vocab_size = reader, packing, vocab_size
        self._held_out_below = rank_below(held_out)
        self._order = ChunkOrder(reader.source.sizes, packing.seed)
        self._began = position or {"chunk": 0, "first": read}
        #: What became of the examples of the chunks before those in memory, in an earlier run too.
        self._before = Counts(**self._began.get("counts", {}))
        self._chunks: list[Chunk] = []
        self._next: Future[Chunk] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memascend-data")
        self._stopping = threading.Event()
        self._fingerprint = reader.source.fingerprint()

    @property
    def seq_len(self) -> int:
        return self._packing.seq_len

    @property
    def pad_id(self) -> int:
        return self._packing.pad_id

    @property
    def per_epoch(self) -> None:
        return None

    @property
    def held(self) -> int:
        # As the plan counts sequences: 16 bytes for each place.
        return STREAM_BYTES // (16 * self._packing.seq_len)

    @property
    def name(self) -> str:
        return self._reader.source.name

    @property
    def chunks_per_epoch(self) -> int:
        return self._order.per_epoch

    def estimated_per_epoch(self) -> int:
        """Returns about how many sequences a pass has, by the first chunk."""
        chunk = self.first_chunk()
        return round(len(chunk.order) / self._order.share(chunk.number))

    def first_chunk(self) -> Chunk:
        """Returns the chunk at which the run begins, or goes on.

        Raises:
            DataError: it cannot be read, or nothing of the source is trained.
        """
        if not self._chunks:
            self._chunks.append(self._made(self._began["chunk"], self._began["first"]))
        return self._chunks[0]

    def counts(self) -> Counts:
        """Returns what became of the examples of all chunks so far, the one in training included."""
        return self._before + self.first_chunk().collected.counts

    def fill(self, batch: Microbatch, row: int, place: int) -> None:
        """Writes the sequence at ``place`` over the padding in a row; waits for its chunk."""
        self.first_chunk()
        while self._chunks[-1].end <= place:
            made = (self._next or self._begin_next()).result()
            self._next = None
            self._chunks.append(made)
        if self._next is None:
            # From its first sequence on there is the time of a whole chunk to make the one after it.
            self._next = self._begin_next()
        for chunk in self._chunks:
            if chunk.first <= place < chunk.end:
                chunk.packed.fill(batch, row, chunk.order[place - chunk.first])
                return
        raise IndexError(f"sequence {place} is no longer in memory, which begins at {self._chunks[0].first}")

    def first_example(self) -> Encoded:
        """Returns the first example of the first chunk."""
        return self.first_chunk().packed.members(0)[0]

    def position(self, place: int) -> Position:
        """Returns the chunk in which ``place`` is; lets go of those before it."""
        self.first_chunk()
        while len(self._chunks) > 1 and self._chunks[0].end <= place:
            self._before += self._chunks.pop(0).collected.counts
        chunk, before = self._chunks[0], asdict(self._before)
        if chunk.end <= place:
            counts = asdict(self._before + chunk.collected.counts)
            return {"chunk": chunk.number + 1, "first": chunk.end, "counts": counts}
        return {"chunk": chunk.number, "first": chunk.first, "digest": chunk.digest, "counts": before}

    def check_position(self) -> None:
        """Returns when the chunk at which the run goes on is the one at which it stopped.

        Raises:
            DataError: it is not: the data was changed where the samples of its digest do not see it.
        """
        was = self._began.get("digest")
        if was is not None and self.first_chunk().digest != was:
            raise DataError(
                f"the data '{self.name}' was changed since this run stopped: the examples that it was at are others "
                "now; nothing was changed. Put the file back as it was to go on, or begin a new run with the new one "
                "(another run.dir)"
            )

    def digests(self) -> Mapping[str, str]:
        """Returns the digest of the source, made of samples, and of what decides the tokens."""
        return {"": f"{self._fingerprint}:{self._reader.encoder.digest()[:16]}"}

    def close(self) -> None:
        """Stops making the next chunk and closes the source."""
        self._stopping.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reader.source.close()

    def _begin_next(self) -> Future[Chunk]:
        last = self._chunks[-1]
        return self._executor.submit(self._made, last.number + 1, last.end)

    def _made(self, number: int, first: int) -> Chunk:
        """Returns the first chunk from ``number`` on that holds something to train."""
        counts = Counts()
        for chunk in range(number, number + self._order.per_epoch):
            if self._stopping.is_set():
                raise DataError("the data is closed")
            self._reader.source.check_unchanged()
            builder = ExampleBuilder()
            blocks = self._reader.blocks(self._order.blocks(chunk).tolist())
            collection = collect(
                takewhile(lambda _: not self._stopping.is_set(), blocks),
                builder,
                seq_len=self.seq_len,
                too_long=self._packing.too_long,
                keep=lambda rank: rank >= self._held_out_below,
            )
            everything = np.ones(len(collection.ranks), np.bool_)
            counts += collection.counts(everything) + Counts(wrong=collection.wrong)
            numbers, seed = collection.numbers(everything), seed_of_chunk(self._packing.seed, chunk)
            if numbers:
                examples = builder.finish()
                check_vocabulary(examples, self._vocab_size)
                packed = self._packing.packed(examples, numbers, seed)
                order = self._packing.order(packed, seed).take(0, len(packed)).tolist()
                collected = Collected(
                    counts, collection.kinds, collection.with_special_text, collection.answers_not_found
                )
                return Chunk(chunk, first, packed, order, packed.digest(), collected)
        raise DataError(nothing_trained(self.name, counts, self.seq_len))
