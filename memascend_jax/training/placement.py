# SPDX-License-Identifier: Apache-2.0
"""Where the training state lives while it is not being computed on, behind one interface.

The step, the prefetcher and the updater speak to a ``Placement``; ``ssd_placement`` streams through leased
slots, ``memory_placement`` keeps everything in the arena and is the reference with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memascend_jax.training.model_layout import PARAMETER, UpdateGroup, UpdatePiece
from memascend_jax.training.stage_schedule import StageKey

if TYPE_CHECKING:
    import jax


class LoadedStage(Protocol):
    """A stage's parameters, being read or there. Lifetime: until ``release``."""

    version: int

    def arrays(self) -> dict[str, jax.Array]:
        """Waits for the read and returns the parameters by local name, as aliases where the platform allows."""

    def forget_arrays(self) -> None:
        """Lets go of the arrays, which on a device with memory of its own are copies; ``arrays`` makes new ones."""

    def refresh(self) -> None:
        """Asks anew for what an update changes; the rest stays as it is. Waits only for memory.

        ``arrays`` then returns those of the current version.
        """

    def release(self) -> None:
        """Gives the memory back; computations already dispatched on the arrays may still be reading it."""


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """One update group in host memory.

    ``address(piece, leaf)`` is where that leaf of that piece lies; ``view(piece, leaf)`` the same as a flat numpy view.
    """

    group: UpdateGroup
    address: Callable[[UpdatePiece, str], int]
    view: Callable[[UpdatePiece, str], NDArray[Any]]


#: Told of a group in memory, whose gradients mean nothing; what it returns is done when its memory may change again.
Visit = Callable[[LoadedGroup], Sequence[Future[None]]]


class Fill(Protocol):
    """Puts the state of groups into memory."""

    def begin(self, loaded: LoadedGroup) -> Sequence[Future[None]]:
        """Starts reading what can be read beside other work."""

    def finish(self, loaded: LoadedGroup) -> None:
        """Called in order of the groups when that is done: afterwards the group is in its memory."""


class Placement(Protocol):
    """The interface between the step and wherever the state lives."""

    version: int
    #: Whether an update goes on beside the next forward, so that rows needed first are worth updating ahead.
    overlaps_update: bool

    def load(self, key: StageKey) -> LoadedStage:
        """Starts reading a stage; waits only for memory."""

    def read_rows(self, tensor: str, rows: NDArray[np.int64], leaf: str = PARAMETER) -> NDArray[Any]:
        """Returns ``[len(rows), columns]`` of the embedding or of one of its state leaves; the caller owns the array.

        Waits for an update that is under way.
        """

    def spool(self, tensor: str, start: int, gradient: jax.Array, n_elements: int) -> None:
        """Puts away the first ``n_elements`` of a rounded gradient that begins at element ``start`` of ``tensor``.

        Waits for the array to be computed; it may go afterwards.
        """

    def begin_early_update(self, apply: Callable[[LoadedGroup], None]) -> None:
        """Before the first gradient of a backward: layers are updated as soon as their gradients are there.

        Stages are read as they were until ``begin_update``, which starts the update of the rest.
        """

    def update_early(self, tensors: Collection[str]) -> None:
        """Says that the gradients of ``tensors`` are put away, to be updated early if that was begun."""

    def cancel_update(self) -> None:
        """Gives up an early update, of which nothing may be committed."""

    def drop_gradients(self) -> None:
        """Forgets the gradients that were put away, instead of an update: the state stays as it is."""

    def prepare_update(self) -> None:
        """Waits until the state that the next update starts from is whole."""

    def begin_update(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        """Starts calling ``apply`` on every update group in forward order, and putting the results back.

        Stages and rows that are loaded from now on are of the new version. ``apply`` may be called on another thread.
        Waits for the commit that is under way; a failure of the update is raised by whoever needs its results.

        Args:
            skip_gradient: parameters that have no spooled gradient: their gradient memory is zeroed instead.
        """

    def finish_update(self) -> None:
        """Waits for the end of the update that ``begin_update`` started."""

    def write(self, tensor: str, start: int, values: NDArray[Any]) -> None:
        """Initialises elements of a tensor or state leaf; ``start`` on a tile boundary, whole tiles."""

    def read(self, tensor: str, start: int, n_elements: int) -> NDArray[Any]:
        """Returns a copy of elements of a tensor or state leaf."""

    def visit_groups(self, visit: Visit) -> None:
        """Shows the state of every update group, in order, to ``visit``; waits for the update and commit under way."""

    def fill_groups(self, fill: Fill) -> None:
        """Lets ``fill`` make the state of every update group, in order: the next commit makes it that of the run."""

    def begin_commit(self, run_state: bytes) -> None:
        """Starts making the update under way and everything written before the next generation.

        The next update, write or commit waits for it; a failure is raised there or by ``finish_commit``.
        """

    def finish_commit(self) -> None:
        """Waits until the update, and the generation that ``begin_commit`` started, are on disk."""

    def io_bytes(self) -> tuple[int, int]:
        """Returns the bytes read from and written to SSD so far."""

    def close(self) -> None:
        """Waits for what is in flight and lets go of the memory."""
