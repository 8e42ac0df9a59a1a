# SPDX-License-Identifier: Apache-2.0
"""A source's blocks as tokens: from the cache where they are in it, else tokenized and put there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memascend_jax.data.collect import check_faults
from memascend_jax.data.encode import EncodedBlock, Encoder
from memascend_jax.data.source import Fault, Source
from memascend_jax.data.token_cache import TokenCache
from memascend_jax.errors import DataError


@dataclass(slots=True)
class Reader:
    """Reads blocks of a source.

    Args:
        skip_bad: records that are no examples are left out and counted, instead of ending the run.
    """

    source: Source
    encoder: Encoder
    cache: TokenCache | None = None
    skip_bad: bool = False

    def blocks(self, numbers: Sequence[int]) -> Iterator[EncodedBlock]:
        """Yields the blocks of ``numbers``.

        Raises:
            DataError: they hold records that are none; raised after the last block, with how many there are. Nothing
                is yielded after the first.
        """
        faults: list[Fault] = []
        records = 0
        for number in numbers:
            if faults:
                # All that is wrong is told at once; the rest is only looked at.
                items = list(self.source.load(number).items(self.encoder.kind))
                faults += [item for item in items if isinstance(item, Fault)]
                records += len(items)
                continue
            block = self._block(number)
            records += len(block) + len(block.faults)
            if block.faults and not self.skip_bad:
                faults += block.faults
            else:
                yield block
        check_faults(self.source.name, faults, records)
        if not records and len(numbers) == len(self.source.sizes):
            raise DataError(
                f"the data file '{self.source.name}' is empty: it has no record, and no text; set data.source"
            )

    def _block(self, number: int) -> EncodedBlock:
        loaded = self.source.load(number)
        found = self.cache.get(loaded.key) if self.cache is not None and loaded.key else None
        if found is not None:
            return found
        block = self.encoder.encode(loaded)
        # What is wrong is read again, for its message.
        if self.cache is not None and loaded.key and not block.faults:
            self.cache.put(loaded.key, block)
        return block
