# SPDX-License-Identifier: Apache-2.0
"""One step of a checkpoint on disk: what it is of, whether it is whole, and its arrays. Reaches neither jax nor orbax.

A step is a folder as orbax makes it: ``state`` with the arrays, ``run`` with the record of the run, ``metrics``. It
has its name only when it is whole; ``_CHECKPOINT_METADATA`` is the last file that is written into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from memascend_jax.checkpoints.array_files import ArrayReader
from memascend_jax.checkpoints.array_layout import (
    TRAILER_BYTES,
    ZARR_FILE,
    ArrayLayout,
    array_from_json,
    state_arrays,
)
from memascend_jax.checkpoints.step_digests import StepDigests, read_digests
from memascend_jax.errors import DataError
from memascend_jax.models.adapters import Adapters, adapters_from_json, model_tensors
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import TensorShape
from memascend_jax.optim.state_format import StateFormat, state_format
from memascend_jax.units import counted

STATE, RUN, METRICS, MODEL_FILES = "state", "run", "metrics", "_model"
#: The last file of a step.
COMMITTED = "_CHECKPOINT_METADATA"
PROGRAM = "memascend-jax"
SCHEMA = 1
_SHOWN = 8
_MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step is of; the contents of ``run``.

    Attributes:
        step: steps done.
        state_format, param_dtype: which arrays there are.
        model: the keys of Hugging Face's ``config.json``.
        run_state: what the run goes on with, as its own ``RunState`` writes it.
        run_id: of the run that saved it.
        version: of the program that saved it.
        frozen: tensors that were not trained, and have no state.
        adapters: LoRA adapters, as their ``to_json`` writes them; None: there are none.
        digests: the file in ``state`` with the checksums of all files; None: an earlier version wrote none.
    """

    step: int
    state_format: str
    param_dtype: str
    model: Mapping[str, Any]
    run_state: Mapping[str, Any]
    run_id: str | None
    version: str
    frozen: Sequence[str] = ()
    adapters: Mapping[str, Any] | None = None
    digests: str | None = None
    schema: int = SCHEMA
    program: str = PROGRAM

    def to_json(self) -> dict[str, Any]:
        """Returns what ``read_record`` reads."""
        return asdict(self)


@dataclass(frozen=True)
class SavedStep:
    """A step whose record was read; its arrays are looked at when they are asked for."""

    path: Path
    record: StepRecord
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digests(self) -> StepDigests | None:
        """The checksums of its files; None: it was saved by an earlier version, which wrote none.

        Raises:
            DataError: their file is missing or damaged.
        """
        return None if self.record.digests is None else read_digests(self.state_folder)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.record.model)

    @cached_property
    def adapters(self) -> Adapters | None:
        return None if self.record.adapters is None else adapters_from_json(self.record.adapters)

    @cached_property
    def tensors(self) -> list[TensorShape]:
        return model_tensors(self.config, self.adapters)

    @cached_property
    def format(self) -> StateFormat:
        return state_format(self.record.state_format, self.record.param_dtype)

    @property
    def state_folder(self) -> Path:
        return self.path / STATE

    @cached_property
    def arrays(self) -> dict[tuple[str, str], ArrayLayout]:
        """The arrays by group and tensor.

        Raises:
            DataError: some are missing, of another shape than the model's, or their files are not whole; all are told.
        """
        found: dict[tuple[str, str], ArrayLayout] = {}
        faults = []
        for expected in state_arrays(self.format, self.tensors, frozenset(self.record.frozen)):
            layout, fault = self._read_array(expected)
            faults += [fault] if fault else []
            if layout is not None:
                found[layout.group, layout.tensor] = layout
        if faults:
            more = f"; and {counted(len(faults) - _SHOWN, 'more', 'more')}" if len(faults) > _SHOWN else ""
            raise DataError(
                f"the checkpoint '{self.path}' is not whole: {'; '.join(faults[:_SHOWN])}{more}. Use another step"
            )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays' files."""
        return sum(layout.file_bytes for layout in self.arrays.values())

    def reader(self, group: str, tensor: str) -> ArrayReader:
        """Returns what reads one array from its first element on."""
        layout = self.arrays[group, tensor]
        if self.digests is None:
            return ArrayReader(self.state_folder / layout.key, layout)
        names = map(layout.chunk_file, range(layout.chunks))
        files = self.digests.files
        digests = {name: files[path] for name in names if (path := f"{layout.key}/{name}") in files}
        return ArrayReader(self.state_folder / layout.key, layout, digests)

    def _read_array(self, expected: ArrayLayout) -> tuple[ArrayLayout | None, str | None]:
        folder = self.state_folder / expected.key
        try:
            values = json.loads((folder / ZARR_FILE).read_text(encoding="utf-8"))
            layout = array_from_json(expected.group, expected.tensor, values)
        except FileNotFoundError:
            return None, f"'{expected.key}' is missing"
        except (OSError, ValueError) as error:
            return None, f"'{expected.key}/{ZARR_FILE}' cannot be read ({error})"
        if (layout.shape, layout.dtype) != (expected.shape, expected.dtype):
            got = f"{layout.dtype} {list(layout.shape)}"
            return None, f"'{expected.key}' is {got}, not {expected.dtype} {list(expected.shape)}"
        if self.digests is not None:
            fault = self.digests.fault_of_file(self.state_folder, f"{expected.key}/{ZARR_FILE}")
            if fault is not None:
                return None, fault
        for chunk in range(layout.chunks):
            path = folder / layout.chunk_file(chunk)
            size, wanted = _size(path), layout.chunk_bytes + TRAILER_BYTES
            if size != wanted:
                is_ = "is missing" if size is None else f"has {size:,} bytes instead of {wanted:,}"
                return None, f"'{path.relative_to(self.state_folder)}' {is_}"
        return layout, None


def open_step(path: Path) -> SavedStep:
    """Returns the step in the folder ``path``, its record read; of its arrays nothing is known yet.

    Raises:
        DataError: nothing is there, it is no step or was not saved by this program, it is not whole, or it is of a
            newer version.
    """
    if not path.is_dir():
        there = find_steps(path.parent) if path.name.isdecimal() else []
        others = f"; the steps in '{path.parent}' are: {', '.join(map(str, there))}" if there else ""
        raise DataError(f"cannot open the checkpoint '{path}': there is no such folder{others}")
    if not is_step(path):
        raise DataError(
            f"cannot open the checkpoint '{path}': it holds no step of a checkpoint ({STATE}, {RUN}); nothing was "
            "changed. Give checkpoint.dir of a run, or one step in it"
        )
    if not _size(path / COMMITTED):
        raise DataError(
            f"the checkpoint '{path}' is not whole: it has no {COMMITTED}, which is written last. Use another step"
        )
    _check_committed(path)
    record, values = _read_record(path)
    saved = SavedStep(path, record, _read_json(path / METRICS, "metrics") or {})
    if saved.digests is not None:
        faults = list(saved.digests.faults_of_values(values, saved.metrics))
        if faults:
            raise DataError(f"the checkpoint '{path}' is damaged: {'; '.join(faults)}. Use another step")
    return saved


def find_steps(root: Path) -> list[int]:
    """Returns the steps in the folder ``root``, ascending; what is not whole has another name."""
    try:
        names = [entry.name for entry in root.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if str(int(name)) == name)


def resolve_step(path: Path, step: int | None = None) -> SavedStep:
    """Returns a step: of a folder of steps the newest or ``step``, or ``path`` itself where it is one.

    Raises:
        DataError: see ``open_step``; or there is no such step, with those that there are.
    """
    steps = find_steps(path)
    if is_step(path) and step is not None and str(step) != path.name:
        raise DataError(
            f"the checkpoint '{path}' is one step; give the folder above it to choose step {step}"
        )
    if is_step(path) or (not steps and step is None):
        return open_step(path)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise DataError(f"the checkpoint '{path}' has no step {step}; the steps there are: {there}")
    return open_step(path / str(steps[-1] if step is None else step))


def is_step(path: Path) -> bool:
    """Returns whether ``path`` is the folder of a step, whole or not, of any program that saves as this one does."""
    return (path / STATE).is_dir() or (path / RUN).is_dir()


def is_checkpoint(path: Path) -> bool:
    """Returns whether ``path`` is a step or a folder of steps of this program; looks at names only."""
    folders = [path, *(path / str(step) for step in find_steps(path)[-1:])]
    return any((folder / RUN).is_dir() and (folder / STATE).is_dir() for folder in folders)


def differences(saved: SavedStep, tensors: Sequence[TensorShape]) -> Iterator[str]:
    """Yields in what the model of ``saved`` differs from one of ``tensors``."""
    theirs = {tensor.name: tensor.shape for tensor in saved.tensors}
    ours = {tensor.name: tensor.shape for tensor in tensors}
    for name in ours.keys() | theirs.keys():
        if name not in theirs:
            yield f"'{name}' is not in the checkpoint"
        elif name not in ours:
            yield f"'{name}' is not in the model"
        elif ours[name] != theirs[name]:
            yield f"'{name}' is {list(theirs[name])} in the checkpoint, {list(ours[name])} in the model"


def check_model(saved: SavedStep, tensors: Sequence[TensorShape]) -> None:
    """Returns when the checkpoint is one of a model of ``tensors``.

    Raises:
        DataError: names or shapes differ; the first of them are told.
    """
    faults = sorted(differences(saved, tensors))
    if faults:
        more = f"; and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
        raise DataError(
            f"the checkpoint '{saved.path}' is of another model: {'; '.join(faults[:_SHOWN])}{more}. Use the model "
            "that it was saved from, or another checkpoint"
        )


def _check_committed(path: Path) -> None:
    """Orbax's last file: nothing is read from it here, but orbax refuses a step without it."""
    values = _read_json_file(path / COMMITTED, "last file")
    if not isinstance(values, dict) or not isinstance(values.get("item_handlers"), dict):
        raise DataError(
            f"the checkpoint '{path}' is damaged: its {COMMITTED} does not say what is saved in it. Use another step"
        )


def _read_record(path: Path) -> tuple[StepRecord, dict[str, Any]]:
    """The record, and the values that it was read from."""
    values = _read_json(path / RUN, "record")
    if not isinstance(values, dict) or values.get("program") != PROGRAM:
        raise DataError(
            f"the checkpoint '{path}' was not saved by this program: its '{RUN}' is "
            f"{'missing' if values is None else 'of something else'}; orbax may be able to read it"
        )
    schema = values.get("schema")
    if schema != SCHEMA:
        raise DataError(
            f"the checkpoint '{path}' is of format version {schema}, this program reads version {SCHEMA}; it was saved "
            f"by version {values.get('version')} of the program: use that or a newer one"
        )
    try:
        record = StepRecord(**values)
        state_format(record.state_format, record.param_dtype)
        dict(record.model), dict(record.run_state)
        _check_step_number(record)
        if record.adapters is not None:
            adapters_from_json(record.adapters)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint '{path}' is damaged: its '{RUN}' is not a record: {error}"
        ) from error
    return record, values


def _read_json(folder: Path, what: str) -> Any:
    """The JSON that orbax wrote to ``folder``, whose name depends on orbax's version; None where there is none."""
    for name in ("data.json", "metadata", "metrics"):
        if _size(folder / name) is not None:
            return _read_json_file(folder / name, what)
    return None


def _read_json_file(path: Path, what: str) -> Any:
    size = _size(path)
    if size is not None and size > _MAX_RECORD_BYTES:
        raise DataError(f"the checkpoint's {what} '{path}' has {size:,} bytes, which cannot be right")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the checkpoint's {what} '{path}' cannot be read: {error}; use another step"
        ) from error


def _check_step_number(record: StepRecord) -> None:
    steps = [record.step, *([record.run_state["step"]] if "step" in record.run_state else [])]
    if any(type(step) is not int or step < 0 for step in steps) or len(set(steps)) > 1:
        raise ValueError(f"{' and '.join(map(repr, steps))} cannot be the number of its step")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
