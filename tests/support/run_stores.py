# SPDX-License-Identifier: Apache-2.0
"""Stores as runs leave them, with made-up moments, and without a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from stores import ANY_DISK

from memascend_jax.config import load_config, to_dict
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, tensor_shapes
from memascend_jax.optim.format_conversion import ExactState, Rounding, encode_tile
from memascend_jax.optim.state_format import state_format, tile_elements
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.storage.tile_stream import TileStream
from memascend_jax.training.run_state import RunState
from memascend_jax.training.stored_state import StoredState, state_specs, write_state

#: Rows of 96 elements: groups of scales go across rows; tables of several tiles, the last one shorter.
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TILE = 12288


def run_config(name: str = "fp32", *overrides: str, **shape):
    sizes = [f"model.config.{key}={value}" for key, value in {**SHAPE, **shape}.items()]
    settings = [f"optimizer.state_format={name}", "train.seed=5", *sizes, *overrides]
    return load_config(["tiny_random"], settings)


def exact_state(name: str, shape: tuple[int, ...]) -> ExactState:
    """Made-up masters and moments of a tensor, the same at every call."""
    rng = np.random.default_rng(list(name.encode()))
    master, mu, nu = (rng.standard_normal(math.prod(shape)).astype(np.float32) for _ in range(3))
    return ExactState(master * 0.02, mu * 1e-3, np.square(nu) * 1e-6)


def make_run_store(paths, name: str = "fp32", *overrides: str, step: int = 7, **options) -> RunState:
    """Writes the store of a run in state format ``name`` and returns what it remembers."""
    shape = {key: options.pop(key) for key in list(options) if key in SHAPE}
    config = run_config(name, *overrides, **shape)
    compute = config.model.compute_dtype
    fmt = state_format(name, "bfloat16" if compute == "auto" else compute)
    state = RunState(step, to_dict(config), TILE, metrics_bytes=123, tokens=4567, results={"seconds": 1.5})
    tensors = tensor_shapes(ModelConfig.from_hf(config.model.config))
    specs = [
        spec
        for tensor in tensors
        for spec in state_specs(
            fmt,
            tensor.name,
            tensor.shape,
            tile_elements(tensor.shape, TILE),
            row_access=tensor.name == EMBED_NAME,
        )
    ]
    with TensorStore.create(paths, specs=specs, scratch_bytes=1 << 16, **{**ANY_DISK, **options}) as store:
        stream = TileStream(store)
        for tensor in tensors:
            tile, exact = tile_elements(tensor.shape, TILE), exact_state(tensor.name, tensor.shape)
            for number, start in enumerate(range(0, tensor.elements, tile)):
                part = slice(start, start + tile)
                values = ExactState(exact.master[part], exact.mu[part], exact.nu[part])
                encoded = encode_tile(fmt, values, Rounding(0, step, tensor.name, start))
                write_state(stream, fmt, tensor.name, number, tensor.elements, tile, encoded)
        stream.finish()
        store.commit(state.encode())
    return state


def read_state(paths, name: str):
    """Returns every parameter's whole state, in the store's format, by name."""
    fmt = state_format(name, "bfloat16")
    with TensorStore.open(paths, read_only=True, **ANY_DISK) as store:
        stored = StoredState(store, fmt)
        return {
            parameter: stored.read(parameter, 0, math.prod(stored.shape(parameter)))
            for parameter in stored.parameters
        }


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files below a folder, to compare what must not have changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
