# SPDX-License-Identifier: Apache-2.0
"""Carries out a planned sequence of stage loads ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend_jax.errors import RunError
from memascend_jax.observe import trace
from memascend_jax.training.placement import LoadedStage, Placement
from memascend_jax.training.stage_schedule import Action, StageKey

if TYPE_CHECKING:
    import jax


@dataclass(slots=True)
class StayingStages:
    """Stages that stay in memory: what is frozen of them nothing changes, so that one read serves the run.

    Attributes:
        keys: which stay, once they are ``loaded``.
        changing: those of which something is trained, to be asked for anew after an update.
    """

    keys: frozenset[StageKey] = frozenset()
    changing: frozenset[StageKey] = frozenset()
    loaded: dict[StageKey, LoadedStage] = field(default_factory=dict)

    @property
    def are_there(self) -> bool:
        return len(self.loaded) == len(self.keys)

    def release(self) -> None:
        """Gives their memory back."""
        for stage in self.loaded.values():
            stage.release()
        self.loaded.clear()


class Prefetcher:
    """Hands out stages in the order of ``sequence`` and keeps the reads of ``actions`` ahead of it.

    Use: ``arrays = prefetcher.use(key)``, dispatch the computation, ``prefetcher.advance()``. Advancing after the
    dispatch lets the wait for a slot overlap the computation just queued. A stage whose parameters were read before
    the last update is an error, never used.

    Args:
        before_use: called before each stage is used, so that it may hold up the computation.
        staying: stages that stay when this is closed, and are there for the next one.
        depth: uses ahead that a stage which stays is asked for anew.
    """

    def __init__(
        self,
        placement: Placement,
        sequence: Sequence[StageKey],
        actions: Sequence[Action],
        before_use: Callable[[], None] = lambda: None,
        *,
        staying: StayingStages | None = None,
        depth: int = 0,
    ) -> None:
        self._staying = StayingStages() if staying is None else staying
        self._before_use = before_use
        self._placement = placement
        self._sequence = sequence
        self._actions = actions
        self._resident: dict[StageKey, LoadedStage] = {}
        self._position = 0
        self._depth = depth
        self._carry_out(actions[0])

    def use(self, key: StageKey) -> dict[str, jax.Array]:
        """Waits for the stage at the current position and returns its parameters by local name.

        Raises:
            RunError: ``key`` is not the next of the sequence, or its parameters are from before an update.
        """
        self._before_use()
        if trace.current is not None:
            trace.current.stage = str(key)
        expected = self._sequence[self._position]
        if key != expected:
            raise RunError(f"stage {key} was used at position {self._position}, where {expected} is planned")
        stays = key in self._staying.keys
        loaded = (self._staying.loaded if stays else self._resident)[key]
        if stays and key not in self._staying.changing:
            return loaded.arrays()
        if loaded.version != self._placement.version:
            raise RunError(
                f"stage {key} holds parameters of version {loaded.version}, "
                f"but the current version is {self._placement.version}"
            )
        return loaded.arrays()

    def advance(self) -> None:
        """Moves to the next position: drops and loads what is planned before it."""
        key = self._sequence[self._position]
        if key in self._staying.keys:
            # Its slots stay; what a device holds of them is only for the stages being computed.
            self._staying.loaded[key].forget_arrays()
        self._position += 1
        if self._position < len(self._sequence):
            self._carry_out(self._actions[self._position])

    def close(self) -> None:
        """Releases everything still resident."""
        for loaded in self._resident.values():
            loaded.release()
        self._resident.clear()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry_out(self, action: Action) -> None:
        for key in action.drops:
            self._resident.pop(key).release()
        for key in action.loads:
            where = self._staying.loaded if key in self._staying.keys else self._resident
            # A pass that was broken off may have left some of what stays.
            if key not in where:
                where[key] = self._placement.load(key)
        for key in self._sequence[self._position : self._position + self._depth + 1]:
            stage = self._staying.loaded.get(key) if key in self._staying.changing else None
            if stage is not None and stage.version != self._placement.version:
                stage.refresh()
