# SPDX-License-Identifier: Apache-2.0
"""Embedding rows that were updated ahead of their tiles, for the next forward."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.training.placement import Placement


class RowsAhead:
    """Keeps the rows of one step; whoever asks for others gets them from the placement."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows: NDArray[np.int64] | None = None
        self._values: NDArray[Any] | None = None

    def keep(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Takes the new values ``[n, columns]`` of ``rows``."""
        self._rows, self._values = rows, values

    def forget(self) -> None:
        """Drops what is kept: it is of an older version."""
        self._rows = self._values = None

    def read(self, tensor: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns ``[n, columns]`` of ``rows``: those kept if they are the same ones."""
        if self._rows is not None and self._values is not None and np.array_equal(rows, self._rows):
            return self._values
        return self._placement.read_rows(tensor, rows)
