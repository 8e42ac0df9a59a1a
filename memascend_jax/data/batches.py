# SPDX-License-Identifier: Apache-2.0
"""Which sequences a step reads: a pure function of the seed and the step, so a resume needs only the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

#: Micro-batches whose sequences are sorted by length together: more lie closer, fewer keep the drawn order.
_SORTED_BATCHES = 64


@dataclass(slots=True)
class BatchOrder:
    """The order of ``n`` sequences over endless epochs, each epoch a permutation drawn from (seed, epoch).

    Args:
        lengths: of the sequences, to put those of about one length into one micro-batch; None: as drawn.
        together: sequences of a micro-batch.
    """

    n: int
    seed: int
    lengths: npt.NDArray[np.int64] | None = None
    together: int = 1
    _drawn: dict[int, np.ndarray] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"an order needs at least one sequence, got {self.n}")

    def batch(self, step: int, micro_batches: int, micro_batch_size: int) -> np.ndarray:
        """Returns the sequences of ``step`` (from 0), int64 [micro_batches, micro_batch_size].

        The sequences of a step are the same for every split of their number into micro-batches.
        """
        size = micro_batches * micro_batch_size
        return self.take(step * size, size).reshape(micro_batches, micro_batch_size)

    def take(self, first: int, count: int) -> np.ndarray:
        """Returns ``count`` sequences after ``first`` others, int64 [count].

        The end of an epoch is followed by the start of the next.
        """
        places = np.arange(first, first + count, dtype=np.int64)
        chosen = [self._epoch(int(place // self.n))[place % self.n] for place in places]
        return np.array(chosen, np.int64)

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._drawn:
            for old in [drawn for drawn in self._drawn if drawn < epoch - 1]:
                del self._drawn[old]
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            drawn = generator.permutation(self.n)
            self._drawn[epoch] = drawn if self.lengths is None else self._grouped(drawn, generator)
        return self._drawn[epoch]

    def _grouped(self, drawn: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Sorts spans of ``drawn`` by length, and puts the micro-batches of each span into a drawn order."""
        assert self.lengths is not None
        span, groups = self.together * _SORTED_BATCHES, []
        for start in range(0, self.n, span):
            part = drawn[start : start + span]
            part = part[np.argsort(-self.lengths[part], kind="stable")]
            whole = len(part) // self.together * self.together
            batches = part[:whole].reshape(-1, self.together)
            groups += [batches[generator.permutation(len(batches))].ravel(), part[whole:]]
        return np.concatenate(groups)


def steps_of_epochs(
    epochs: float, n: int, sequences_per_step: int, done_steps: int = 0, read: int = 0
) -> int:
    """Returns the fewest steps that read ``epochs`` times ``n`` sequences, at least one.

    Args:
        done_steps: steps that have been done already, of whatever size.
        read: sequences that were read in them.
    """
    left = max(0, math.ceil((epochs * n - read) / sequences_per_step))
    return max(1, done_steps + left)
