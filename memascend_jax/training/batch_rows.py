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
    """The distinct token ids of a step, and of the step after it, whose gradient rows are kept apart too.

    Attributes:
        used: ``[n_used]`` int64, ascending: the rows of this step.
        ahead: ``[n_ahead]`` int64, ascending: the rows of the next step.
        rows: ``[n]`` int64, ascending: both.
        padded: ``[capacity]`` int32: ``rows`` followed by ``NO_ROW``; one length for all steps keeps one executable.
        inverse: per micro-batch ``[batch, seq]`` int32, index into ``rows``.
    """

    used: NDArray[np.int64]
    ahead: NDArray[np.int64]
    rows: NDArray[np.int64]
    padded: NDArray[np.int32]
    inverse: tuple[NDArray[np.int32], ...]


def collect_rows(
    micro_batches: Sequence[Microbatch], vocab_size: int, ahead: Sequence[Microbatch] = ()
) -> BatchRows:
    """Returns the rows that ``micro_batches`` and the next step's use.

    The capacity is the tokens of both or the vocabulary, the smaller.
    """
    used, later = distinct_rows(micro_batches), distinct_rows(ahead)
    rows = np.union1d(used, later)
    n_tokens = sum(micro_batch.tokens.size for micro_batch in (*micro_batches, *ahead))
    padded = np.full(min(n_tokens, vocab_size), NO_ROW, np.int32)
    padded[: len(rows)] = rows
    inverse = tuple(
        np.searchsorted(rows, micro_batch.tokens).astype(np.int32) for micro_batch in micro_batches
    )
    return BatchRows(used, later, rows, padded, inverse)


def distinct_rows(micro_batches: Sequence[Microbatch]) -> NDArray[np.int64]:
    """Returns the distinct token ids of ``micro_batches``, ascending."""
    if not micro_batches:
        return np.empty(0, np.int64)
    return np.unique(np.stack([micro_batch.tokens for micro_batch in micro_batches])).astype(np.int64)
