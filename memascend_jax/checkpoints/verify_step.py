# SPDX-License-Identifier: Apache-2.0
"""Reads every byte of a step and compares the checksums; describes steps. Changes nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memascend_jax.checkpoints.array_layout import TREE_FILE, tree_text
from memascend_jax.checkpoints.saved_step import COMMITTED, MODEL_FILES, SavedStep, find_steps, open_step
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import DataError
from memascend_jax.storage.engine import aligned_buffer
from memascend_jax.units import MIB

_PIECE_BYTES = 8 * MIB
_THREADS = 4


@dataclass(frozen=True, slots=True)
class StepReport:
    """What was read of a step, and what is wrong with it: a sentence each.

    Attributes:
        recorded: whether the checksums of all files were written down by name when it was saved; without that, files
            of one size that were exchanged are not noticed, nor damage to small ones.
    """

    step: int
    arrays: int
    bytes: int
    faults: tuple[str, ...]
    recorded: bool = True


def verify_step(saved: SavedStep) -> StepReport:
    """Returns what a step holds and every fault of it; holds a few pieces of 8 MiB at a time.

    Raises:
        OSError: the disk failed.
    """
    try:
        arrays = list(saved.arrays)
    except DataError as error:
        return StepReport(saved.record.step, 0, 0, (str(error),))
    found: list[str | None] = [*array_faults(saved), *_small_files(saved)]
    if saved.path.name.isdecimal() and int(saved.path.name) != saved.record.step:
        found.append(
            f"the checkpoint '{saved.path}' is of step {saved.record.step}, whatever its name says; give it that name"
        )
    faults = tuple(fault for fault in found if fault is not None)
    recorded = saved.digests is not None
    return StepReport(saved.record.step, len(arrays), saved.nbytes, faults, recorded)


def array_faults(saved: SavedStep) -> list[str]:
    """Returns what is wrong with the arrays, whose files all have the right sizes: a sentence for each array."""
    with ThreadPoolExecutor(_THREADS) as executor:
        found = executor.map(lambda key: _fault(saved, key), list(saved.arrays))
        return [fault for fault in found if fault is not None]


def check_step(saved: SavedStep) -> None:
    """Returns when everything that a run goes on with from the step is as it was saved; reads all of it.

    Raises:
        DataError: something is missing or damaged.
    """
    _ = saved.arrays
    faults = array_faults(saved)
    if faults:
        more = f"; and {len(faults) - 1:,} more" if len(faults) > 1 else ""
        raise DataError(f"{faults[0]}{more}")


def newest_whole_step(root: Path) -> tuple[SavedStep | None, dict[int, str]]:
    """Returns the newest step that is as it was saved, and why newer ones are not used, by step."""
    refused = {}
    for step in reversed(find_steps(root)):
        try:
            saved = open_step(root / str(step))
            check_step(saved)
        except DataError as error:
            refused[step] = str(error)
        else:
            return saved, refused
    return None, refused


def _small_files(saved: SavedStep) -> list[str | None]:
    """The faults of what is no array: orbax's description of the tree, and the files of the model."""
    digests, state = saved.digests, saved.state_folder
    if digests is None:
        # At least that it is there and can be read.
        try:
            tree = json.loads((state / TREE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return [f"the checkpoint's '{state / TREE_FILE}' cannot be read: {error}"]
        expected = json.loads(tree_text(list(saved.arrays.values())))
        return [
            None if tree == expected else f"'{state / TREE_FILE}' does not describe the arrays that there are"
        ]
    names = [TREE_FILE, *(name for name in digests.files if name.startswith(f"{MODEL_FILES}/"))]
    faults = [digests.fault_of_file(state, name) for name in names]
    return [None if fault is None else f"the checkpoint '{saved.path}': {fault}" for fault in faults]


def _fault(saved: SavedStep, key: tuple[str, str]) -> str | None:
    reader = saved.reader(*key)
    layout = reader.layout
    step = _PIECE_BYTES // layout.itemsize
    memory = aligned_buffer(min(step, layout.elements) * layout.itemsize).view(to_dtype(layout.dtype))
    try:
        for start in range(0, layout.elements, step):
            values = memory[: min(step, layout.elements - start)]
            reader.read(start, values)
            reader.check(start, values)
    except DataError as error:
        return str(error)
    return None


def describe_step(path: Path) -> dict[str, Any]:
    """Returns what is known of the step in ``path`` without reading its arrays; ``fault`` is None when it is whole."""
    facts: dict[str, Any] = {"step": int(path.name) if path.name.isdecimal() else None, "path": str(path)}
    try:
        saved = open_step(path)
        record = saved.record
        facts |= {
            "step": record.step,
            "saved_s": (path / COMMITTED).stat().st_mtime,
            "state_format": record.state_format,
            "version": record.version,
            "tokens": record.run_state.get("tokens"),
            "loss": record.run_state.get("results", {}).get("loss_last"),
            "eval_loss": saved.metrics.get("eval_loss"),
            "parameters": int(np.sum([tensor.elements for tensor in saved.tensors], dtype=np.int64)),
            "bytes": saved.nbytes,
        }
    except DataError as error:
        return {**facts, "fault": str(error)}
    return {**facts, "fault": None}
