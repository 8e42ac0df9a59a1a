# SPDX-License-Identifier: Apache-2.0
"""What a source of examples is: blocks that can be read in any order, and several sources as one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memascend_jax.data.records import Example
from memascend_jax.units import KIB

#: Text of a block: so much is read, tokenized and kept in the cache at once.
BLOCK_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that is no example: where, why, whether it is not even JSON, and the sign that it begins with."""

    where: object
    why: str
    not_json: bool = False
    begins: bytes = b""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a source.

    Attributes:
        key: decides, with the kind of record, what ``items`` yields: equal keys, equal examples.
        items: yields its examples and faults in order; a record's kind is what its argument says.
    """

    key: bytes
    items: Callable[[str], Iterator[Example | Fault]]


class Source(Protocol):
    """A file, a folder of files, or what examples are made of otherwise.

    Attributes:
        name: as the user knows it.
        sizes: bytes of text of each block, about; int64 [blocks].
        form: what the blocks are pieces of: ``JSONL``, ``Parquet``, …
    """

    name: str
    form: str

    @property
    def sizes(self) -> npt.NDArray[np.int64]: ...

    def load(self, block: int) -> Block:
        """Returns a block, from 0; raises ``DataError`` when it cannot be read."""

    def fingerprint(self) -> str:
        """Returns a digest of the contents, in hex, made without reading all of a large file."""

    def check_unchanged(self) -> None:
        """Raises ``DataError`` when a file is another than when it was opened."""

    def close(self) -> None:
        """Closes its files."""


@dataclass(slots=True)
class Joined:
    """Several sources as one, block after block."""

    name: str
    parts: Sequence[Source]
    form: str = field(init=False)
    _ends: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.form = self.parts[0].form
        self._ends = np.cumsum([len(part.sizes) for part in self.parts])

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.concatenate([part.sizes for part in self.parts])

    def load(self, block: int) -> Block:
        """Returns a block of one of them."""
        part = int(np.searchsorted(self._ends, block, side="right"))
        return self.parts[part].load(block - (int(self._ends[part - 1]) if part else 0))

    def fingerprint(self) -> str:
        """Returns a digest of the digests."""
        digests = ";".join(part.fingerprint() for part in self.parts)
        return hashlib.sha256(digests.encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raises ``DataError`` when one of them is changed."""
        for part in self.parts:
            part.check_unchanged()

    def close(self) -> None:
        """Closes all of them."""
        for part in self.parts:
            part.close()


def total_bytes(source: Source) -> int:
    """Returns the bytes of text of all blocks, about."""
    return int(source.sizes.sum())
