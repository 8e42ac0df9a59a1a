# SPDX-License-Identifier: Apache-2.0
"""What a model can be exported from: a run's store or folder, a step of a checkpoint, a model. jax-free.

All of them give elements in the type that they are kept in or rounded from what they know most exactly: a run's fp32
masters. Nothing is changed, and a store that a run is writing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.saved_model import SavedModel
from memascend_jax.checkpoints.saved_step import is_checkpoint, resolve_step
from memascend_jax.checkpoints.smollm2 import smollm2_135m_path
from memascend_jax.checkpoints.source import PIECE_BYTES, Checkpoint, open_checkpoint
from memascend_jax.checkpoints.store_checkpoint import StoreCheckpoint, is_model_record
from memascend_jax.config import load_config, store_paths
from memascend_jax.dtypes import dtype_name
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.adapters import Adapters, model_tensors
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import TensorShape
from memascend_jax.optim.format_conversion import master_of
from memascend_jax.optim.rounding import round_master, widen
from memascend_jax.recipes.inputs import SMOLLM2, open_model
from memascend_jax.recipes.lora import base_name
from memascend_jax.recipes.stored_run import config_of, format_of, open_committed, run_of, without_data
from memascend_jax.storage.device import resolve_paths
from memascend_jax.storage.engine import ReusedBuffers
from memascend_jax.storage.formatting import has_superblock
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.stored_state import StoredState

#: ``read(name, start, n, dtype)``: elements of a tensor in order, in the type that is asked for.
Read = Callable[[str, int, int, str], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model that is open for export.

    Attributes:
        config: of the model.
        shapes: its tensors, those of adapters too.
        dtypes: the type that each tensor is kept in.
        files: what an exported folder holds beside the weights.
        read: gives the elements; see ``Read``.
        facts: what it is, for the user: ``step`` and ``generation`` where there are such.
        adapters: LoRA adapters that were trained beside the model; None: there are none.
        base: what an adapter is loaded beside: a path, or the name of a repository.
    """

    config: ModelConfig
    shapes: Sequence[TensorShape]
    dtypes: Mapping[str, str]
    files: Mapping[str, bytes]
    read: Read
    facts: Mapping[str, Any] = field(default_factory=dict)
    adapters: Adapters | None = None
    base: str | None = None


def open_source(
    paths: Sequence[str], step: int | None, stack: ExitStack, revision: str | None = None
) -> ExportSource:
    """Returns the model at ``paths``; ``stack`` closes it.

    Args:
        paths: members of a store; or one path: a run's folder, a checkpoint, a Hugging Face folder, a GGUF file; or
            ``smollm2-135m``, or ``org/name`` in Hugging Face's cache.
        step: of a checkpoint; None: the newest.
        revision: of a model in the cache; None: ``main``.

    Raises:
        StoreError: there is no store, it is in use, or it holds no single step of a run.
        DataError: the model that the run started from is gone, whose tokenizer and configuration are needed; or the
            checkpoint or model is damaged.
        ConfigError: a step or a revision is given for what has none.
    """
    found = _run_folder_contents(paths, checkpoints=step is not None)
    only = Path(found[0]).expanduser() if len(found) == 1 else None
    if only is not None and only.is_dir() and is_checkpoint(only):
        return _of_checkpoint(SavedModel(resolve_step(only, step)), stack)
    if step is not None:
        raise ConfigError(
            f"--step={step}: '{', '.join(paths)}' is no checkpoint, which alone has steps to choose"
        )
    if only is None or _is_store(only):
        return _of_store(found, stack)
    if paths == [SMOLLM2]:
        return _of_checkpoint(open_checkpoint(smollm2_135m_path()), stack)
    return _of_checkpoint(open_checkpoint(found[0], revision), stack)


def _run_folder_contents(paths: Sequence[str], *, checkpoints: bool) -> list[str]:
    """``paths``, or of a run's folder its store, or where that is gone or ``checkpoints`` are asked for those."""
    folder = Path(paths[0]).expanduser()
    if len(paths) != 1 or not (folder / "config.yaml").is_file() or not (folder / "status.json").is_file():
        return [str(Path(path).expanduser()) for path in paths]
    config = load_config([str(folder / "config.yaml")], [])
    # What the run calls its folder is relative to where it was started.
    stores = (
        list(map(str, store_paths(config))) if config.offload.store else [str(folder / "memascend.store")]
    )
    if not checkpoints and all(Path(path).exists() for path in resolve_paths(stores)):
        return stores
    saved = Path(config.checkpoint.dir).expanduser() if config.checkpoint.dir else folder / "checkpoints"
    if is_checkpoint(saved):
        return [str(saved)]
    if checkpoints:
        raise DataError(f"cannot export a step of the run in '{folder}': '{saved}' has no checkpoints")
    raise DataError(
        f"cannot export the run in '{folder}': its store {', '.join(stores)} is not there, nor a checkpoint in "
        f"'{saved}'. Give the path of its store"
    )


def _is_store(path: Path) -> bool:
    return has_superblock(resolve_paths(str(path))[0])


def _of_store(paths: Sequence[str], stack: ExitStack) -> ExportSource:
    with TensorStore.open(list(paths), read_only=True, direct_io="optional") as store:
        is_model = is_model_record(store.run_state)
    if is_model:
        return _of_checkpoint(StoreCheckpoint(list(paths)), stack)
    store = stack.enter_context(open_committed(paths))
    run = run_of(store)
    state, buffers = StoredState(store, format_of(run)), ReusedBuffers()
    model = open_model(without_data(config_of(run)))
    stack.callback(model.close)

    def read(name: str, start: int, n: int, dtype: str) -> NDArray[Any]:
        fmt = state.format_of(name)
        if dtype == fmt.param_dtype:
            return store.read_elements(name, start, n, buffers)
        return rounded(name, master_of(fmt, state.read(name, start, n, masters_only=True)), dtype)

    shapes = model_tensors(model.config, model.adapters)
    return ExportSource(
        config=model.config,
        shapes=shapes,
        dtypes={shape.name: store.spec(shape.name).dtype for shape in shapes},
        files=model.export_files(),
        read=read,
        facts={"step": run.step, "generation": store.generation},
        adapters=model.adapters,
        base=base_name(run.config["model"]["source"]),
    )


def _of_checkpoint(checkpoint: Checkpoint, stack: ExitStack) -> ExportSource:
    stack.callback(checkpoint.close)
    config = ModelConfig.from_hf(checkpoint.config)
    kept = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
    facts: dict[str, Any] = {}
    dtypes, adapters, base = kept, None, None
    if isinstance(checkpoint, SavedModel):
        # It gives its masters; the parameters are what they round to.
        dtypes = dict.fromkeys(kept, checkpoint.saved.format.param_dtype)
        record = checkpoint.saved.record
        facts, adapters = {"step": record.step}, checkpoint.saved.adapters
        base = base_name(record.run_state["config"]["model"]["source"]) if adapters is not None else None
    source = _InOrder(checkpoint)

    def read(name: str, start: int, n: int, dtype: str) -> NDArray[Any]:
        values = source.read(name, start, n)
        return values if dtype_name(values.dtype) == dtype else rounded(name, widen(values), dtype)

    shapes = model_tensors(config, adapters)
    return ExportSource(config, shapes, dtypes, checkpoint.export_files(), read, facts, adapters, base)


class _InOrder:
    """Elements of a checkpoint's tensors by range, where each range begins where the one before has ended."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._pieces: Iterator[tuple[int, NDArray[Any]]] = iter(())
        self._held: NDArray[Any] | None = None

    def read(self, name: str, start: int, n: int) -> NDArray[Any]:
        if start == 0:
            self._pieces, self._held = self._checkpoint.pieces(name, PIECE_BYTES), None
        parts = [] if self._held is None else [self._held]
        while sum(part.size for part in parts) < n:
            parts.append(next(self._pieces)[1].reshape(-1))
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._held = joined[n:]
        return joined[:n]


def rounded(name: str, master: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns ``master`` rounded to nearest.

    Raises:
        DataError: float16 cannot hold it.
    """
    values = round_master(np.ascontiguousarray(master), dtype)
    if dtype == "float16" and not np.isfinite(values).all() and np.isfinite(master).all():
        raise DataError(
            f"cannot export '{name}' as float16: it has values up to {np.abs(master).max():.3g}, float16 ends at "
            "65504. Use bfloat16 or float32"
        )
    return values
