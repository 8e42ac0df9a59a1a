# SPDX-License-Identifier: Apache-2.0
"""Which sequences a step reads: a pure function of the seed and the step, so a resume needs only the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class BatchOrder:
    """The order of ``n`` sequences over endless epochs, each epoch a permutation drawn from (seed, epoch)."""

    n: int
    seed: int
    _drawn: dict[int, np.ndarray] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"an order needs at least one sequence, got {self.n}")

    def batch(self, step: int, micro_batches: int, micro_batch_size: int) -> np.ndarray:
        """Returns the sequences of ``step`` (from 0), int64 [micro_batches, micro_batch_size].

        The sequences of a step are the same for every split of their number into micro-batches. The end of an epoch
        is followed by the start of the next, inside a step too.
        """
        size = micro_batches * micro_batch_size
        places = np.arange(step * size, (step + 1) * size, dtype=np.int64)
        chosen = [self._epoch(int(place // self.n))[place % self.n] for place in places]
        return np.array(chosen, np.int64).reshape(micro_batches, micro_batch_size)

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._drawn:
            for old in [drawn for drawn in self._drawn if drawn < epoch - 1]:
                del self._drawn[old]
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._drawn[epoch] = generator.permutation(self.n)
        return self._drawn[epoch]


def steps_of_epochs(epochs: float, n: int, sequences_per_step: int) -> int:
    """Returns the fewest steps that read ``epochs`` times ``n`` sequences, at least one."""
    return max(1, math.ceil(epochs * n / sequences_per_step))
