# SPDX-License-Identifier: Apache-2.0
"""The order in which blocks of a source are read: chunks of blocks from all over it, another order in every epoch.

A chunk is what is shuffled and packed together, so examples of one chunk come from many places of the source, however
it is sorted. Chunks are numbered over all epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memascend_jax.units import MIB

#: Text of a chunk: 32 blocks of lines. A run holds two or three.
CHUNK_BYTES = 8 * MIB
#: Text of the first chunk of an epoch, for which a run has to wait.
FIRST_BYTES = MIB


@dataclass(slots=True)
class ChunkOrder:
    """Which blocks make a chunk.

    Args:
        sizes: bytes of text of each block.
        seed: of the order.
    """

    sizes: npt.NDArray[np.int64]
    seed: int
    per_epoch: int = field(init=False)
    _groups: int = field(init=False, repr=False)
    _first: int = field(init=False, repr=False)
    _epoch: tuple[int, list[npt.NDArray[np.int64]]] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        blocks, nbytes = len(self.sizes), int(self.sizes.sum())
        self._groups = min(max(1, round(nbytes / CHUNK_BYTES)), blocks)
        self._first = max(1, round(FIRST_BYTES * blocks / max(1, nbytes)))
        # The first of several groups becomes two chunks.
        self.per_epoch = self._groups + (self._groups > 1 and -(-blocks // self._groups) > self._first)

    def blocks(self, chunk: int) -> npt.NDArray[np.int64]:
        """Returns the blocks of ``chunk``, from 0, in the order in which they are read."""
        epoch, index = divmod(chunk, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, (0x63686E6B << 32) + epoch]))
            drawn = generator.permutation(len(self.sizes))
            groups = np.array_split(drawn, self._groups)
            if self.per_epoch > self._groups:
                groups[:1] = np.split(groups[0], [self._first])
            self._epoch = (epoch, groups)
        return self._epoch[1][index]

    def share(self, chunk: int) -> float:
        """Returns the share of all blocks that are in ``chunk``, above 0 to 1."""
        return len(self.blocks(chunk)) / len(self.sizes)


def seed_of_chunk(seed: int, chunk: int) -> int:
    """Returns the seed of what is drawn within a chunk; ``seed`` is below 2**32, as ``train.seed`` is."""
    return seed + ((chunk + 1) << 32)
