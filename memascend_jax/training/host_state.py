# SPDX-License-Identifier: Apache-2.0
"""The update groups that stay in host memory between steps: their slots, and where gradients go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.storage.engine import address_of
from memascend_jax.training.model_layout import GRADIENT, ModelLayout, UpdatePiece
from memascend_jax.training.residency import Residency, gradient_offsets, piece_key
from memascend_jax.training.slot_classes import GRADIENTS, UPDATE


class GradientRun(NamedTuple):
    """Elements ``[start, start + n)`` of a tensor; ``address`` is their place in host memory, or None on SSD."""

    start: int
    n: int
    address: int | None


class HostState:
    """The slots of the groups that ``residency`` names, leased until ``close``."""

    def __init__(self, layout: ModelLayout, pool: SlotPool, residency: Residency) -> None:
        self._states = {index: pool.lease(UPDATE, label=f"state {index}") for index in residency.state}
        self._gradients = {
            index: pool.lease(GRADIENTS, label=f"gradients {index}") for index in residency.gradients
        }
        #: State groups whose slot holds what the last update left.
        self.current: set[int] = set()
        self._pieces: dict[str, list[tuple[UpdatePiece, NDArray[Any] | None]]] = {}
        dtype = to_dtype(layout.format.grad_dtype)
        for index, group in enumerate(layout.update_groups):
            offsets, _ = gradient_offsets(layout, group)
            for piece in group.pieces:
                view = None
                if index in self._states:
                    view = self._states[index].view(dtype, (piece.n_elements,), piece.offsets[GRADIENT])
                elif index in self._gradients:
                    view = self._gradients[index].view(dtype, (piece.n_elements,), offsets[piece_key(piece)])
                self._pieces.setdefault(piece.tensor, []).append((piece, view))

    def slot(self, index: int) -> Lease | None:
        """Returns the slot of a group whose state stays."""
        return self._states.get(index)

    def gradient_view(self, piece: UpdatePiece) -> NDArray[Any] | None:
        """Returns the gradients of ``piece`` in host memory, ``[n_elements]``, or None when they are on SSD."""
        return self._pieces[piece.tensor][piece.tile][1]

    def runs(self, tensor: str, start: int, n_elements: int) -> Iterator[GradientRun]:
        """Yields where the gradients of ``n_elements`` of ``tensor`` from ``start`` on go, piece by piece."""
        end = start + n_elements
        for piece, view in self._pieces[tensor]:
            first = max(start, piece.start)
            n = min(end, piece.start + piece.n_elements) - first
            if n > 0:
                address = None if view is None else address_of(view[first - piece.start :])
                yield GradientRun(first, n, address)

    def close(self) -> None:
        """Gives the slots back."""
        self._pieces.clear()
        for lease in (*self._states.values(), *self._gradients.values()):
            lease.release()
