# SPDX-License-Identifier: Apache-2.0
"""The store's own memory for copies: in parts, so that one is filled while the others are on their way."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memascend_jax.storage.engine import aligned_buffer

DEFAULT_BOUNCE_BYTES = 8 << 20


class Arena(Protocol):
    """What the store needs of a ``PinnedArena``."""

    def allocate(self, nbytes: int, label: str = "") -> Any: ...
    def regions(self) -> list[tuple[int, int]]: ...


class Bounce:
    """Two halves of ``half_bytes`` each, from the arena when there is one. Hold ``lock`` while using them.

    Not for the step path: what goes through here is copied. It serves imports, exports, row reads and checks.
    """

    def __init__(self, nbytes: int, arena: Arena | None) -> None:
        self.lock = threading.RLock()
        self.half_bytes = nbytes // 2
        self._slot = arena.allocate(nbytes, label="store bounce") if arena is not None else None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._nbytes = nbytes

    def half(self, index: int) -> npt.NDArray[np.uint8]:
        """Returns half 0 or 1 (``index`` counts on), allocated on first use when there is no arena."""
        if self._memory is None:
            whole = (
                aligned_buffer(self._nbytes) if self._slot is None else np.frombuffer(self._slot, np.uint8)
            )
            self._memory = whole[: 2 * self.half_bytes]
        begin = index % 2 * self.half_bytes
        return self._memory[begin : begin + self.half_bytes]

    def parts(self, count: int) -> list[npt.NDArray[np.uint8]]:
        """Returns the same memory as ``count`` parts of one size; ``count`` is 2, 4 or 8."""
        each = 2 * self.half_bytes // count
        halves = [self.half(0), self.half(1)]
        return [half[begin : begin + each] for half in halves for begin in range(0, self.half_bytes, each)]

    def close(self) -> None:
        """Gives the memory back."""
        self._memory = None
        if self._slot is not None:
            self._slot.release()
            self._slot = None
