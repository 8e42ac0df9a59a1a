# SPDX-License-Identifier: Apache-2.0
"""Which rows of the embedding a step uses: read once, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memascend_jax.data.packing import Microbatch

#: Padding of the row list: larger than any vocabulary, so it falls into no tile.
NO_ROW = np.int32(1 << 30)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The distinct token ids of a step and where each token's row is among them.

    Attributes:
        rows: ``[n_distinct]`` int64, ascending.
        padded: ``[capacity]`` int32: ``rows`` followed by ``NO_ROW``; one length for all steps keeps one executable.
        inverse: per micro-batch ``[batch, seq]`` int32, index into ``rows``.
    """

    rows: NDArray[np.int64]
    padded: NDArray[np.int32]
    inverse: tuple[NDArray[np.int32], ...]


def collect_rows(micro_batches: Sequence[Microbatch], vocab_size: int) -> BatchRows:
    """Returns the rows that ``micro_batches`` use; capacity is the step's tokens or the vocabulary, the smaller."""
    tokens = np.stack([micro_batch.tokens for micro_batch in micro_batches])
    rows, inverse = np.unique(tokens, return_inverse=True)
    padded = np.full(min(tokens.size, vocab_size), NO_ROW, np.int32)
    padded[: len(rows)] = rows
    return BatchRows(rows.astype(np.int64), padded, tuple(inverse.reshape(tokens.shape).astype(np.int32)))
