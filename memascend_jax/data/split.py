# SPDX-License-Identifier: Apache-2.0
"""The sources of a run, opened, and which of their examples are held out.

Of a source in memory those with the smallest ranks are held out, so many as the fraction says. Of a streamed one an
example is held out when its rank is below the fraction of all possible ranks, which needs no other example: all of
these are left out of the training. Those that are found first, in an order of blocks that is always the same, are
evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memascend_jax.data.collect import collect
from memascend_jax.data.collection import Collection, Counts, rank_below
from memascend_jax.data.encode import EncodedBlock, Encoder
from memascend_jax.data.examples import ExampleBuilder
from memascend_jax.data.files import open_source
from memascend_jax.data.pydocs import Pydocs
from memascend_jax.data.reading import Reader
from memascend_jax.data.records import AUTO
from memascend_jax.data.settings import DataSettings, SourceSpec
from memascend_jax.data.source import Block, Joined, Source, total_bytes
from memascend_jax.data.token_cache import TokenCache
from memascend_jax.data.tokenize import Coder
from memascend_jax.data.unpack import Unpacker
from memascend_jax.units import MIB

PYDOCS = "pydocs"
#: Text of a streamed source in which held-out examples are looked for, and of which all are taken.
_LOOKED_THROUGH_BYTES = 32 * MIB
_TAKEN_BYTES = 8 * MIB


@dataclass(slots=True)
class Part:
    """A source that has its own share; ``collection`` is None for one that is streamed."""

    name: str
    reader: Reader
    weight: float | None
    collection: Collection | None = None

    def trained(self, settings: DataSettings) -> npt.NDArray[np.bool_]:
        """Returns which examples of a source in memory are trained on."""
        assert self.collection is not None
        if settings.eval_source is not None:
            return np.ones(len(self.collection.ranks), np.bool_)
        return ~self.collection.held_out(settings.eval_fraction)

    def close(self) -> None:
        """Closes the files."""
        self.reader.source.close()


@dataclass(frozen=True, slots=True)
class Held:
    """Held-out examples: the chosen ones of a collection."""

    collection: Collection
    chosen: npt.NDArray[np.bool_]

    def numbers(self) -> list[int]:
        """Returns their numbers in the builder."""
        return self.collection.numbers(self.chosen)

    def ranks(self) -> set[int]:
        """Returns their ranks."""
        return set(np.array(self.collection.ranks, np.uint64)[self.chosen].tolist())

    def counts(self) -> Counts:
        """Returns what became of them."""
        return self.collection.counts(self.chosen)


def open_parts(settings: DataSettings, coder: Coder, *, evaluation: bool = False) -> list[Part]:
    """Returns the sources, opened: one for each weight, or all as one where there are none.

    Args:
        evaluation: those of ``data.eval_source`` instead.
    """
    key = "data.eval_source" if evaluation else "data.sources" if settings.sources else "data.source"
    specs = settings.specs()
    if evaluation:
        assert settings.eval_source is not None
        specs = [SourceSpec(settings.eval_source)]
    folder = settings.cache / "unpacked" if settings.cache else None
    unpacker = Unpacker(folder, settings.say, settings.looks_only)
    opened = [_opened(spec, settings.kind, unpacker, key) for spec in specs]
    weighted = any(spec.weight is not None for spec in specs)
    groups = [[source] for source in opened] if weighted else [opened]
    weights = [spec.weight for spec in specs] if weighted else [None]
    encoder = Encoder(coder, settings.kind)
    parts = []
    for group, weight in zip(groups, weights, strict=True):
        source = group[0] if len(group) == 1 else Joined(", ".join(one.name for one in group), group)
        is_streamed = settings.is_streamed(total_bytes(source))
        cache = None
        if settings.cache is not None and (is_streamed or settings.cache_all):
            cache = TokenCache(settings.cache, encoder.digest(), settings.cache_home, settings.say)
        reader = Reader(source, encoder, cache, settings.bad_records == "skip")
        parts.append(Part(source.name, reader, weight))
    return parts


def read_part(part: Part, settings: DataSettings, builder: ExampleBuilder) -> None:
    """Reads a source whole, unless it is streamed.

    Raises:
        DataError: there is something wrong with it.
    """
    source = part.reader.source
    if settings.is_streamed(total_bytes(source)):
        return
    part.collection = collect(
        part.reader.blocks(range(len(source.sizes))),
        builder,
        seq_len=settings.seq_len,
        too_long=settings.too_long,
    )
    part.close()


def held_out_of(part: Part, settings: DataSettings, builder: ExampleBuilder) -> Held:
    """Returns what is held out of a source that has been read; of ``data.eval_source`` all.

    Raises:
        DataError: there is something wrong with what is read of a streamed source.
    """
    fraction = 1.0 if settings.eval_source is not None else settings.eval_fraction
    if part.collection is not None:
        everything = np.ones(len(part.collection.ranks), np.bool_)
        return Held(part.collection, everything if fraction == 1 else part.collection.held_out(fraction))
    if not fraction:
        return Held(Collection(builder), np.zeros(0, np.bool_))
    below = rank_below(fraction)
    found = collect(
        _enough(part, settings, below),
        builder,
        seq_len=settings.seq_len,
        too_long=settings.too_long,
        keep=lambda rank: rank < below,
    )
    return Held(found, np.ones(len(found.ranks), np.bool_))


def _enough(part: Part, settings: DataSettings, below: int) -> Iterator[EncodedBlock]:
    """Yields blocks until their held-out examples fill an evaluation; for one without a limit some of the source."""
    source = part.reader.source
    order = np.random.Generator(np.random.Philox(key=[0, 0x6865 << 48])).permutation(len(source.sizes))
    wanted = None if settings.eval_sequences is None else settings.eval_sequences * settings.seq_len
    most = _TAKEN_BYTES if wanted is None else _LOOKED_THROUGH_BYTES
    places = looked = 0
    for number in order.tolist():
        for block in part.reader.blocks([number]):
            lengths = np.minimum(block.examples.lengths() - 1, settings.seq_len)
            places += (
                int(lengths[block.ranks < np.uint64(below)].sum()) if below < 1 << 64 else int(lengths.sum())
            )
            yield block
        looked += int(source.sizes[number])
        if looked >= most or (wanted is not None and places > wanted + settings.seq_len):
            return


def _opened(spec: SourceSpec, kind: str, unpacker: Unpacker, key: str) -> Source:
    own = spec.kind if spec.kind != AUTO else kind
    source: Source = Pydocs() if spec.path == PYDOCS else open_source(spec.path, own, unpacker, key)
    return source if own == kind else _OfKind(source, own)


class _OfKind:
    """A source whose records are of one kind, whatever is asked for."""

    def __init__(self, source: Source, kind: str) -> None:
        self._source, self._kind = source, kind
        self.name, self.form = source.name, source.form

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self._source.sizes

    def load(self, block: int) -> Block:
        """Returns a block of records of the kind."""
        loaded = self._source.load(block)
        key = loaded.key + self._kind.encode() if loaded.key else b""
        return Block(key, lambda _: loaded.items(self._kind))

    def fingerprint(self) -> str:
        """Returns the source's."""
        return self._source.fingerprint()

    def check_unchanged(self) -> None:
        """Raises ``DataError`` when the source is changed."""
        self._source.check_unchanged()

    def close(self) -> None:
        """Closes the source."""
        self._source.close()
