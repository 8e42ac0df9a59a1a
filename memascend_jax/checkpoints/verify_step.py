# SPDX-License-Identifier: Apache-2.0
"""Reads every byte of a step and compares the checksums; describes steps. Changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memascend_jax.checkpoints.saved_step import COMMITTED, SavedStep, open_step
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import DataError
from memascend_jax.storage.engine import aligned_buffer
from memascend_jax.units import MIB

_PIECE_BYTES = 8 * MIB
_THREADS = 4


@dataclass(frozen=True, slots=True)
class StepReport:
    """What was read of a step, and what is wrong with it: a sentence each."""

    step: int
    arrays: int
    bytes: int
    faults: tuple[str, ...]


def verify_step(saved: SavedStep) -> StepReport:
    """Returns what a step holds and every fault of it; holds a few pieces of 8 MiB at a time.

    Raises:
        OSError: the disk failed.
    """
    try:
        arrays = list(saved.arrays)
    except DataError as error:
        return StepReport(saved.record.step, 0, 0, (str(error),))
    with ThreadPoolExecutor(_THREADS) as executor:
        found = list(executor.map(lambda key: _fault(saved, key), arrays))
    faults = tuple(fault for fault in found if fault is not None)
    return StepReport(saved.record.step, len(arrays), saved.nbytes, faults)


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
