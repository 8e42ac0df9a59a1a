# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints while it trains: when one is due it is saved, between two steps."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memascend_jax import __version__
from memascend_jax.checkpoints.array_layout import state_arrays
from memascend_jax.checkpoints.saved_step import StepRecord, open_step
from memascend_jax.checkpoints.verify_step import check_step
from memascend_jax.config import Config
from memascend_jax.errors import DataError, MemascendError
from memascend_jax.observe import trace
from memascend_jax.recipes.checkpoint_space import checkpoint_folder, saves_checkpoints
from memascend_jax.training.checkpoint_state import stream_state
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.placement import Placement
from memascend_jax.training.run_state import RunState
from memascend_jax.units import format_bytes

if TYPE_CHECKING:
    from memascend_jax.checkpoints.orbax_steps import OrbaxSteps


class RunCheckpoints:
    """Saves the state of one run.

    Args:
        model_files: what a Hugging Face folder holds besides weights, by name; asked for at each save.
        run_id: the store's, or None.
        say: told of each checkpoint, and of one that could not be saved.
    """

    def __init__(
        self,
        steps: OrbaxSteps,
        layout: ModelLayout,
        placement: Placement,
        model_files: Callable[[], Mapping[str, bytes]],
        run_id: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._steps = steps
        self._layout = layout
        self._placement = placement
        self._model_files = model_files
        self._run_id = run_id
        self._say = say
        self._arrays = state_arrays(layout.format, layout.tensors, layout.frozen)
        self._bytes = sum(array.file_bytes for array in self._arrays)

    def is_due(self, step: int) -> bool:
        """Returns whether the state after ``step`` is to be saved."""
        return step > 0 and self._steps.is_due(step)

    def was_missed(self, step: int) -> bool:
        """Returns whether a run that goes on from ``step`` was killed after its commit and before it was saved."""
        newest = self.newest
        # Earlier than one that there is: it was removed, or the store is older than the checkpoints.
        return self.is_due(step) and (newest is None or newest < step)

    @property
    def newest(self) -> int | None:
        """The newest step that is saved."""
        steps = self._steps.steps
        return steps[-1] if steps else None

    def save(self, state: RunState, eval_loss: float | None) -> None:
        """Saves the state, whose update and commit may still be under way.

        A disk that is full or fails costs the checkpoint, not the run: the user is told, and older steps stay.
        """
        from memascend_jax.checkpoints.orbax_steps import EVAL_LOSS, StreamedState

        self._placement.finish_commit()
        began = time.monotonic()
        record = StepRecord(
            step=state.step,
            state_format=self._layout.format.name,
            param_dtype=self._layout.format.param_dtype,
            model=self._layout.config.to_hf(),
            run_state=json.loads(state.encode()),
            run_id=self._run_id,
            version=__version__,
            frozen=sorted(self._layout.frozen),
            adapters=None if self._layout.adapters is None else self._layout.adapters.to_json(),
        )
        streamed = StreamedState(
            self._arrays,
            lambda write: stream_state(self._layout, self._placement, write),
            self._model_files(),
        )
        try:
            with trace.span(trace.PHASE, "checkpoint"):
                self._check_room()
                gone = self._steps.save(record, streamed, {} if eval_loss is None else {EVAL_LOSS: eval_loss})
        except MemascendError:
            raise
        except OSError as error:
            self._say(
                f"warning: the checkpoint of step {state.step} could not be saved: {error}; the run goes on, with "
                f"the steps saved before ({', '.join(map(str, self._steps.steps)) or 'none'})"
            )
        else:
            seconds = time.monotonic() - began
            removed = f"; removed {', '.join(map(str, gone))}" if gone else ""
            self._say(
                f"step {state.step}: checkpoint of {format_bytes(self._bytes)} in {seconds:.1f} s{removed}"
            )

    def _check_room(self) -> None:
        """Raises ``OSError`` before the first byte when the disk has no room for a step."""
        self._steps.settle()
        space = os.statvfs(self._steps.folder)
        free = space.f_bavail * space.f_frsize
        if free < self._bytes:
            raise OSError(
                f"it takes {format_bytes(self._bytes)}, but only {format_bytes(free)} are free in "
                f"'{self._steps.folder}'"
            )


@contextmanager
def open_checkpoints(
    config: Config,
    layout: ModelLayout,
    placement: Placement,
    model_files: Callable[[], Mapping[str, bytes]],
    run_id: str | None,
    step: int,
    say: Callable[[str], None],
) -> Iterator[RunCheckpoints | None]:
    """Yields what saves checkpoints as ``config`` says, or None when it says none.

    Args:
        step: that the run is at; later ones that are not whole, and in the way of the run's own, are removed.
    """
    if not saves_checkpoints(config):
        yield None
        return
    from memascend_jax.checkpoints.orbax_steps import OrbaxSteps

    keys = config.checkpoint
    assert keys.every
    steps = OrbaxSteps(checkpoint_folder(config), every=keys.every, keep=keys.keep, keep_best=keys.keep_best)
    try:
        damaged = [late for late in steps.steps if late > step and not _is_whole(steps.folder / str(late))]
        if damaged:
            say(f"removed checkpoints that are damaged: step {', '.join(map(str, damaged))}")
        steps.forget(damaged)
        yield RunCheckpoints(steps, layout, placement, model_files, run_id, say)
    finally:
        # What it still waits for is a failed save, which has been told.
        with contextlib.suppress(OSError):
            steps.close()


def _is_whole(path: Path) -> bool:
    try:
        check_step(open_step(path))
    except DataError:
        return False
    return True
