# SPDX-License-Identifier: Apache-2.0
"""The whole training state in the arena, updated beside the next forward: for machines that have the memory.

Every tensor lies whole in a slot of its own, from which stages are aliased or copied to the device; nothing is moved
within host memory, and nothing is on disk. Gradients that are needed for a short time only share slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe import trace
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.state_format import itemsize
from memascend_jax.storage.engine import address_of
from memascend_jax.training.host_update import HostUpdate
from memascend_jax.training.memory_placement import MemoryPlacement
from memascend_jax.training.model_layout import (
    GRADIENT,
    PARAMETER,
    ModelLayout,
    StagePart,
    UpdateGroup,
    UpdatePiece,
)
from memascend_jax.training.placement import LoadedGroup
from memascend_jax.training.residency import (
    PieceKey,
    early_groups,
    early_tensors,
    gradient_offsets,
    piece_key,
)
from memascend_jax.training.slot_classes import (
    ROW_GRADIENTS,
    gradient_class,
    gradient_name,
    has_row_gradients,
    host_contents,
)
from memascend_jax.transfer import Transfer

if TYPE_CHECKING:
    import jax


class HostPlacement(MemoryPlacement):
    """Everything in leases that are held for the whole run, updated in place on a thread of its own.

    Args:
        early_update: layers are updated in the backward, and their gradients lie in slots that go round.

    Lifetime: owns no pool; ``close`` gives up an update that nobody waited for. Threading: driven by one thread.
    """

    def __init__(
        self,
        layout: ModelLayout,
        pool: SlotPool,
        transfer: Transfer,
        clock: StepClock,
        *,
        early_update: bool,
    ) -> None:
        super().__init__(layout, pool, transfer, clock, host_contents(layout, early_update=early_update))
        self.overlaps_update = True
        self._pool = pool
        self._early_tensors = early_tensors(layout) if early_update else frozenset()
        self._early: Callable[[UpdateGroup], None] | None = None
        self._passing: dict[str, Lease] = {}
        self._groups_of: dict[str, list[int]] = {}
        for index in sorted(early_groups(layout)):
            for piece in layout.update_groups[index].pieces:
                self._groups_of.setdefault(piece.tensor, []).append(index)
        self._row_lease, self._row_offsets = None, dict[PieceKey, int]()
        if has_row_gradients(layout):
            self._row_lease = pool.lease(ROW_GRADIENTS)
            for group in layout.update_groups:
                if group.pieces[0].tensor == EMBED_NAME:
                    self._row_offsets |= gradient_offsets(layout, group)[0]
        self._update = HostUpdate(layout, self._let_gradient_go, self._let_gradients_go)

    def read_rows(self, tensor: str, rows: NDArray[np.int64], leaf: str = PARAMETER) -> NDArray[Any]:
        if self._early is None and self._layout.is_trained(tensor):
            self.finish_update()
        return super().read_rows(tensor, rows, leaf)

    def spool(self, tensor: str, start: int, gradient: jax.Array, n_elements: int) -> None:
        with self._clock.span("optimizer"):
            self._update.wait(tensor)
            if tensor in self._early_tensors and tensor not in self._passing:
                # After a failure no slot comes back: it would be waited for in vain.
                self._update.check()
                self._passing[tensor] = self._lease_gradient(tensor)
        super().spool(tensor, start, gradient, n_elements)

    def begin_early_update(self, apply: Callable[[LoadedGroup], None]) -> None:
        self.finish_update()
        self._early = partial(self._apply, apply, frozenset())
        self._update.start()

    def update_early(self, tensors: Collection[str]) -> None:
        if self._early is not None:
            groups = {index for tensor in tensors for index in self._groups_of[tensor]}
            for index in sorted(groups):
                self._update.add(index, self._early)

    def cancel_update(self) -> None:
        if self._early is not None:
            self._early = None
            self._update.give_up()

    def begin_update(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        if self._early is None:
            self.finish_update()
            self._update.start()
        self._early = None
        self._update.add_rest(partial(self._apply, apply, skip_gradient))
        self.version += 1

    def finish_update(self) -> None:
        with self._clock.span("optimizer"):
            self._update.finish()

    def read(self, tensor: str, start: int, n_elements: int) -> NDArray[Any]:
        self.finish_update()
        return super().read(tensor, start, n_elements)

    def finish_commit(self) -> None:
        self.finish_update()

    def close(self) -> None:
        self._update.close()
        for lease in (*self._passing.values(), *filter(None, [self._row_lease])):
            lease.release()
        self._passing.clear()
        super().close()

    def wait_for(self, part: StagePart) -> None:
        end = part.start + part.n_elements
        if not self._update.is_through(part.tensor, end):
            with self._clock.span("optimizer"), trace.span(trace.WAIT, "for the update of", part.tensor):
                self._update.wait(part.tensor, end)

    def _apply(
        self, apply: Callable[[LoadedGroup], None], skip_gradient: frozenset[str], group: UpdateGroup
    ) -> None:
        for piece in group.pieces:
            if piece.tensor in skip_gradient:
                self._view(piece, GRADIENT).view(np.uint8)[:] = 0
        apply(LoadedGroup(group, self._address, self._view))

    def _lease_gradient(self, tensor: str) -> Lease:
        nbytes = math.prod(self._layout.shape_of(tensor)) * itemsize(self._layout.format.grad_dtype)
        lease = self._pool.lease(gradient_class(nbytes), label=gradient_name(tensor))
        # The thread of the update gives it back.
        lease.hand_over()
        return lease

    def _let_gradient_go(self, tensor: str) -> None:
        lease = self._passing.pop(tensor, None)
        if lease is not None:
            lease.release()

    def _let_gradients_go(self) -> None:
        for tensor in list(self._passing):
            self._let_gradient_go(tensor)

    def _gradient_address(self, tensor: str) -> int:
        lease = self._passing.get(tensor)
        if lease is None and tensor in self._early_tensors:
            # An update that has failed meanwhile let all gradients go.
            self._update.check()
        return lease.address if lease is not None else super()._gradient_address(tensor)

    def _address(self, piece: UpdatePiece, leaf: str) -> int:
        return address_of(self._view(piece, leaf))

    def _view(self, piece: UpdatePiece, leaf: str) -> NDArray[Any]:
        dtype = to_dtype(self._layout.leaf_dtype(leaf))
        if leaf == GRADIENT and piece.tensor in self._passing:
            lease = self._passing[piece.tensor]
            return lease.view(dtype, (piece.n_elements,), piece.start * dtype.itemsize)
        if leaf == GRADIENT and self._row_lease is not None and piece.tensor == EMBED_NAME:
            return self._row_lease.view(dtype, (piece.n_elements,), self._row_offsets[piece_key(piece)])
        return super()._view(piece, leaf)
