# SPDX-License-Identifier: Apache-2.0
"""The update groups that stay in host memory between steps: their slots, and where gradients go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Home:
    """A piece, its group, and its gradients in host memory, or None when they go to SSD."""

    piece: UpdatePiece
    group: int
    view: NDArray[Any] | None


class HostState:
    """The slots of the groups that ``residency`` names, leased until ``close``.

    Groups that are updated early, in the backward, get a slot for their gradients when they come (``attach``) and give
    it back when they are updated (``detach``, on the thread of the update).
    """

    def __init__(self, layout: ModelLayout, pool: SlotPool, residency: Residency) -> None:
        self._layout = layout
        self._pool = pool
        self._states = {index: pool.lease(UPDATE, label=f"state {index}") for index in residency.state}
        self._gradients: dict[int, Lease] = {}
        #: State groups whose slot holds what the last update left.
        self.current: set[int] = set()
        self._homes: dict[str, list[_Home]] = {}
        dtype = to_dtype(layout.format.grad_dtype)
        for index, group in enumerate(layout.update_groups):
            for piece in group.pieces:
                view = None
                if index in self._states:
                    view = self._states[index].view(dtype, (piece.n_elements,), piece.offsets[GRADIENT])
                self._homes.setdefault(piece.tensor, []).append(_Home(piece, index, view))
        for index in residency.gradients:
            self.attach(index)
        self._stay = residency.gradients

    def groups_of(self, tensors: Iterable[str]) -> list[int]:
        """Returns the groups of ``tensors``, ascending."""
        return sorted({home.group for tensor in tensors for home in self._homes[tensor]})

    def attach(self, index: int) -> None:
        """Gives a group's gradients a place in host memory; waits for a slot. Nothing if they have one."""
        if index in self._states or index in self._gradients:
            return
        lease = self._pool.lease(GRADIENTS, label=f"gradients {index}")
        # The thread of the update may give it back.
        lease.hand_over()
        self._gradients[index] = lease
        group = self._layout.update_groups[index]
        dtype = to_dtype(self._layout.format.grad_dtype)
        offsets, _ = gradient_offsets(self._layout, group)
        for piece in group.pieces:
            view = lease.view(dtype, (piece.n_elements,), offsets[piece_key(piece)])
            self._homes[piece.tensor][piece.tile].view = view

    def detach(self, index: int) -> None:
        """Ends ``attach``."""
        lease = self._gradients.pop(index, None)
        if lease is not None:
            for piece in self._layout.update_groups[index].pieces:
                self._homes[piece.tensor][piece.tile].view = None
            lease.release()

    def detach_all(self) -> None:
        """Ends every ``attach``: after a failure nobody else would, and who waits for a slot would wait for ever."""
        for index in list(self._gradients):
            if index not in self._stay:
                self.detach(index)

    def slot(self, index: int) -> Lease | None:
        """Returns the slot of a group whose state stays."""
        return self._states.get(index)

    def gradient_view(self, piece: UpdatePiece) -> NDArray[Any] | None:
        """Returns the gradients of ``piece`` in host memory, ``[n_elements]``, or None when they are on SSD."""
        return self._homes[piece.tensor][piece.tile].view

    def runs(self, tensor: str, start: int, n_elements: int) -> Iterator[GradientRun]:
        """Yields where the gradients of ``n_elements`` of ``tensor`` from ``start`` on go, piece by piece."""
        end = start + n_elements
        for home in self._homes[tensor]:
            first = max(start, home.piece.start)
            n = min(end, home.piece.start + home.piece.n_elements) - first
            if n > 0:
                address = None if home.view is None else address_of(home.view[first - home.piece.start :])
                yield GradientRun(first, n, address)

    def close(self) -> None:
        """Gives the slots back."""
        self._homes.clear()
        for lease in (*self._states.values(), *self._gradients.values()):
            lease.release()
