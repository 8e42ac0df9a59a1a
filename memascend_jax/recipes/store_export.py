# SPDX-License-Identifier: Apache-2.0
"""A model as a Hugging Face folder: of a run, whether it has ended or not, of a checkpoint, of a store. jax-free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.checkpoints.peft_adapter import export_adapter
from memascend_jax.errors import ConfigError
from memascend_jax.models.adapters import Adapters, is_adapter
from memascend_jax.observe.screen import Screen
from memascend_jax.recipes.adapter_merge import merge_adapters
from memascend_jax.recipes.export_source import ExportSource, open_source


def export_model(
    paths: Sequence[str],
    out: Path,
    screen: Screen,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    step: int | None = None,
    revision: str | None = None,
    merge: bool = False,
) -> dict[str, Any]:
    """Writes the folder ``out``, one piece at a time, or when it fails nothing.

    Args:
        paths, step, revision: see ``open_source``.
        dtype: of the weights: what is known most exactly, a run's masters, rounded to nearest; None: as they are kept,
            those of adapters float32.
        max_shard_bytes: see ``export_huggingface``.
        merge: write the whole model with the run's adapters added to its weights, not a folder of the adapters alone.

    Returns:
        ``path`` and ``bytes`` of the folder, ``dtype``, and of a run ``step`` and ``generation``.

    Raises:
        StoreError, DataError, ConfigError: see ``open_source``.
        ConfigError: ``out`` exists or cannot be made; or there are no adapters to merge.
        DataError: a weight is beyond what ``dtype`` can hold.
        OSError: the disk has no room, which is found before the first byte, or fails.
    """
    with ExitStack() as stack:
        source = open_source(paths, step, stack, revision)
        if merge:
            if source.adapters is None:
                raise ConfigError(
                    f"--merge: '{', '.join(paths)}' has no adapters to merge; leave --merge out to export the model"
                )
            source = merge_adapters(source)
        if source.adapters is not None:
            return _export_adapter(source, source.adapters, out, screen, dtype or "float32")
        dtypes = {name: dtype or kept for name, kept in source.dtypes.items()}
        with screen.progress("writing the model", len(source.shapes)) as advance:
            nbytes = export_huggingface(
                lambda name, start, n: source.read(name, start, n, dtypes[name]),
                source.shapes,
                dtypes,
                source.config,
                source.files,
                out,
                max_shard_bytes=max_shard_bytes,
                on_tensor=advance,
            )
        return {"path": str(out), "bytes": nbytes, "dtype": _in_short(dtypes.values()), **source.facts}


def _export_adapter(
    source: ExportSource, adapters: Adapters, out: Path, screen: Screen, dtype: str
) -> dict[str, Any]:
    factors = sum(is_adapter(tensor.name) for tensor in source.shapes)
    with screen.progress("writing the adapter", factors) as advance:
        nbytes = export_adapter(
            lambda name, start, n: source.read(name, start, n, dtype),
            dtype,
            source.config,
            adapters,
            source.files,
            source.base,
            out,
            on_tensor=advance,
        )
    return {"path": str(out), "bytes": nbytes, "dtype": dtype, "adapter": True, **source.facts}


def _in_short(dtypes: Any) -> str:
    return ", ".join(sorted(set(dtypes)))
