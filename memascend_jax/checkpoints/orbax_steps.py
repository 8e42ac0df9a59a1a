# SPDX-License-Identifier: Apache-2.0
"""Saves steps with ``orbax.checkpoint.v1``: when, which are kept, whole or not at all.

What orbax does: the folder of a step under a temporary name and its renaming, the record of the run as JSON, the
metrics, the decisions when to save and what to keep. What it must not do is to hold the state as a tree of arrays: a
handler of our own streams it into the files that orbax's handler of trees reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from absl import logging as absl_logging
from numpy.typing import NDArray

from memascend_jax.checkpoints.array_files import ArrayWriter, sync_disk
from memascend_jax.checkpoints.array_layout import TREE_FILE, ZARR_FILE, ArrayLayout, tree_text
from memascend_jax.checkpoints.saved_step import METRICS, MODEL_FILES, RUN, STATE, StepRecord
from memascend_jax.checkpoints.step_digests import DIGESTS_FILE, StepDigests, crc32c, digest_of_values

try:
    from orbax.checkpoint import v1 as ocp  # type: ignore[import-untyped,attr-defined,unused-ignore]
except ImportError:
    # Its place up to 0.12.
    from orbax.checkpoint.experimental import v1 as ocp  # type: ignore[import-untyped,unused-ignore]

EVAL_LOSS = "eval_loss"
#: In the name of a step that is being written, or removed: orbax takes no notice of it, and cleans it away.
_UNFINISHED = ".orbax-checkpoint-tmp"
#: Pieces that are written at once; the disk and its checksums are busy with as many.
_WRITERS = 4

#: ``write(group, tensor, start, values)``: starts writing; the values stay as they are until the futures are done.
Write = Callable[[str, str, int, NDArray[Any]], Sequence[Future[None]]]


@dataclass(frozen=True)
class StreamedState:
    """A training state to save: arrays that come in pieces, and the small files of the model beside them.

    Attributes:
        arrays: all of them.
        stream: calls the function that it is given with every array's elements, each array in order.
        model_files: what a Hugging Face folder holds besides weights, by name.
        record, metrics: what is saved beside it, for their digests to be written down.
    """

    arrays: Sequence[ArrayLayout]
    stream: Callable[[Write], None]
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class StreamedStateHandler:
    """Orbax's ``CheckpointableHandler`` of a ``StreamedState``; to be registered for the name ``state``.

    What it writes is what orbax's own handler, which has that name everywhere else, reads as a tree of arrays. Here
    steps are read by ``SavedStep``, piece by piece and without orbax.
    """

    async def save(self, directory: Any, checkpointable: StreamedState) -> Awaitable[None]:
        """Returns the work, which orbax does on a thread of its own once the folder is there."""
        return _write_state(directory, checkpointable)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        raise NotImplementedError(f"the state in '{directory}' is not loaded whole: read it with SavedStep")

    async def metadata(self, directory: Any) -> Any:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, StreamedState)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


async def _write_state(directory: Any, state: StreamedState) -> None:
    folder = Path(os.fspath(await directory.await_creation()))
    writers: dict[tuple[str, str], ArrayWriter] = {}
    digests: dict[str, int] = {}

    def note(name: str, content: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        digests[name] = crc32c(content)

    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="memascend-checkpoint") as executor:
        for array in state.arrays:
            (folder / array.key).mkdir()
            note(f"{array.key}/{ZARR_FILE}", json.dumps(array.to_json()).encode())
            writers[array.group, array.tensor] = ArrayWriter(folder / array.key, array, executor)

        def write(group: str, tensor: str, start: int, values: NDArray[Any]) -> Sequence[Future[None]]:
            return writers[group, tensor].write(start, values)

        try:
            state.stream(write)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            for writer in writers.values():
                writer.abandon()
            raise
    (folder / MODEL_FILES).mkdir()
    for name, content in state.model_files.items():
        note(f"{MODEL_FILES}/{name}", content)
    note(TREE_FILE, tree_text(state.arrays).encode())
    for array in state.arrays:
        chunks = writers[array.group, array.tensor].digests()
        digests |= {f"{array.key}/{name}": crc for name, crc in chunks.items()}
    kept = StepDigests(digest_of_values(state.record), digest_of_values(state.metrics), digests)
    (folder / DIGESTS_FILE).write_text(kept.to_text(), encoding="utf-8")
    # Before orbax gives the step its name: afterwards it is to be whole.
    sync_disk(folder)


class OrbaxSteps:
    """The steps of one run in ``folder``, which is made if need be; what a killed save left there is removed.

    Args:
        folder: for steps alone.
        every: steps between saves.
        keep: newest steps that are kept.
        keep_best: besides these, the steps of the lowest ``EVAL_LOSS``.
    """

    def __init__(self, folder: Path, *, every: int, keep: int, keep_best: int = 0) -> None:
        # What it would say of a failure is in the exception.
        absl_logging.set_verbosity(absl_logging.FATAL)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._every = every
        self._preservation = _preservation(keep, keep_best)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="memascend-checkpoint-removal")
        self._removing: list[Future[None]] = []
        self._checkpointer = self._open()

    def is_due(self, step: int) -> bool:
        """Returns whether ``step`` is to be saved and is not there yet."""
        return step not in self.steps and bool(self._checkpointer.should_save(step))

    @property
    def steps(self) -> list[int]:
        """The steps that there are, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def save(self, record: StepRecord, state: StreamedState, metrics: Mapping[str, float]) -> list[int]:
        """Leaves the step on disk for good, or nothing of it; then removes and returns those that are not kept.

        Raises:
            OSError: the disk is full or fails, with the path. Older steps are as they were.
        """
        self.settle()
        values = replace(record, digests=DIGESTS_FILE).to_json()
        state = replace(state, record=values, metrics=metrics)
        try:
            self._checkpointer.save_checkpointables(
                record.step, {STATE: state, RUN: values}, force=True, metrics=dict(metrics) or None
            )
        except BaseException:
            # It keeps a failure and raises it again at the next save.
            with contextlib.suppress(Exception):
                self._checkpointer.close()
            self._clean()
            self._checkpointer = self._open()
            raise
        # The record and the name are on disk before an older step goes.
        sync_disk(self.folder)
        context = ocp.training.preservation_policies.PreservationContext()
        checkpoints = self._checkpointer.checkpoints
        kept = self._preservation.should_preserve(checkpoints, context=context)
        gone = [known.step for known, keep in zip(checkpoints, kept, strict=True) if not keep]
        self.forget(gone)
        return gone

    def forget(self, steps: Sequence[int]) -> None:
        """Removes steps, whatever is to be kept: their names at once, their files meanwhile (see ``settle``).

        What a crash leaves of them is removed when the folder is opened again.
        """
        for step in steps:
            gone = self.folder / f"{step}{_UNFINISHED}-removed"
            (self.folder / str(step)).rename(gone)
            self._removing.append(self._remover.submit(shutil.rmtree, gone, ignore_errors=True))
        if steps:
            self._checkpointer.reload()

    def settle(self) -> None:
        """Waits until removed steps have given their space back: seconds, for thousands of files on a busy disk."""
        for future in self._removing:
            future.result()
        self._removing.clear()

    def close(self) -> None:
        """Waits for what orbax still does, and for removals."""
        try:
            self._checkpointer.close()
        finally:
            self._remover.shutdown()

    def _open(self) -> Any:
        registry = ocp.handlers.local_registry(include_global_registry=False)
        registry.add(StreamedStateHandler, checkpointable_name=STATE)
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=RUN)
        registry.add(ocp.handlers.global_registry().get(METRICS), checkpointable_name=METRICS)
        context = ocp.Context()
        context.checkpointables.registry = registry
        policies = ocp.training.preservation_policies
        return ocp.training.Checkpointer(
            self.folder,
            context=context,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(self._every),
            # Not given to orbax, which would remove old steps before the new one is on disk for good: see ``save``.
            preservation_policy=policies.PreserveAll(),
            cleanup_tmp_directories=True,
        )

    def _clean(self) -> None:
        """Removes what a save that failed has left."""
        for path in self.folder.glob(f"*{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> OrbaxSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _preservation(keep: int, keep_best: int) -> Any:
    policies = ocp.training.preservation_policies
    if keep_best == 0:
        return policies.LatestN(keep)
    best = policies.BestN(
        get_metric_fn=lambda metrics: metrics[EVAL_LOSS],
        reverse=True,
        n=keep_best,
        keep_checkpoints_without_metrics=False,
    )
    return policies.AnyPreservationPolicy([policies.LatestN(keep), best])
