# SPDX-License-Identifier: Apache-2.0
"""A model from a Hugging Face folder or a GGUF file into a store of its own, a few pieces at a time. jax-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.smollm2 import smollm2_135m_path
from memascend_jax.checkpoints.source import Checkpoint, CheckpointTensor, open_checkpoint, stream_pieces
from memascend_jax.checkpoints.store_checkpoint import FILE_PREFIX, ModelRecord, file_array, model_specs
from memascend_jax.dtypes import to_dtype
from memascend_jax.observe.screen import Screen
from memascend_jax.optim.rounding import round_master, widen
from memascend_jax.recipes.inputs import SMOLLM2
from memascend_jax.recipes.new_store import new_store
from memascend_jax.storage.ahead import ahead
from memascend_jax.storage.device import resolve_paths
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.storage.tile_stream import TileStream

#: Tiles that are read at once, where they are whole rows.
_TILES_PER_PIECE = 2
_AHEAD_BYTES = 48 << 20


def import_model(
    source: str, paths: Sequence[str], dtype: str | None, screen: Screen, revision: str | None = None
) -> dict[str, Any]:
    """Leaves the model of ``source`` in a new store at ``paths``, byte for byte, or when it fails nothing.

    Args:
        source: a Hugging Face folder, a GGUF file, ``smollm2-135m``, or ``org/name`` in Hugging Face's cache.
        dtype: what the weights are rounded to, to nearest; None: what they are.
        revision: of a model in the cache; None: ``main``.

    Returns:
        ``paths``, ``bytes`` of the store, ``tensors``, ``parameters`` and ``parameter_bytes``.

    Raises:
        DataError: the model is not there, or damaged: everything wrong with its tensors is told.
        StoreError: there is something at ``paths``, or no room; told before the first byte.
    """
    checkpoint = open_checkpoint(smollm2_135m_path() if source == SMOLLM2 else source, revision)
    try:
        tensors = {
            name: CheckpointTensor(tensor.shape, dtype or tensor.dtype)
            for name, tensor in checkpoint.tensors.items()
        }
        files = checkpoint.export_files()
        specs = model_specs(tensors, files)
        # Hundreds of small reads of the digest are no hindrance beside the large ones.
        with (
            ThreadPoolExecutor(1) as beside,
            new_store(specs, resolve_paths(paths), screen) as (store, nbytes),
        ):
            digest = beside.submit(lambda: checkpoint.digest)
            with screen.progress("reading the model", len(tensors)) as advance, TileStream(store) as stream:
                for name, start, values in ahead(_pieces(checkpoint, tensors, store)):
                    stream.write(name, start, values)
                    if start + values.size == _elements(tensors[name]):
                        advance(name)
            for name, content in files.items():
                store.write_elements(FILE_PREFIX + name, 0, file_array(content))
            store.commit(ModelRecord(checkpoint.config, source, digest.result()).encode())
        return {
            "paths": resolve_paths(paths),
            "bytes": nbytes,
            "tensors": len(tensors),
            "parameters": sum(_elements(tensor) for tensor in tensors.values()),
            "parameter_bytes": sum(
                _elements(tensors[spec.name]) * to_dtype(spec.dtype).itemsize
                for spec in specs
                if spec.name in tensors
            ),
        }
    finally:
        checkpoint.close()


def _pieces(
    checkpoint: Checkpoint, tensors: dict[str, CheckpointTensor], store: TensorStore
) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Every tensor in runs of whole tiles."""
    tiles = {name: store.spec(name).tile_elements or 1 for name in tensors}
    sizes = {
        name: _TILES_PER_PIECE * tiles[name] * to_dtype(tensor.dtype).itemsize
        for name, tensor in checkpoint.tensors.items()
    }
    held: list[NDArray[Any]] = []
    for name, start, values in stream_pieces(checkpoint, sizes, _AHEAD_BYTES):
        dtype, end = tensors[name].dtype, start + values.size
        held.append(values if values.dtype.name == dtype else round_master(widen(values), dtype))
        n_held = sum(part.size for part in held)
        whole = n_held if end == _elements(tensors[name]) else n_held // tiles[name] * tiles[name]
        if whole:
            # A piece is whole tiles where these are whole rows, so that there is nothing to join.
            joined = held[0] if len(held) == 1 else np.concatenate(held)
            held = [joined[whole:]] if whole < n_held else []
            yield name, end - n_held, joined[:whole]


def _elements(tensor: CheckpointTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))
