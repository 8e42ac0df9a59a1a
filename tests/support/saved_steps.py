# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints: two tensors of random bytes, saved as a run saves its state."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memascend_jax.checkpoints.array_layout import ArrayLayout, state_arrays
from memascend_jax.checkpoints.orbax_steps import OrbaxSteps, StreamedState
from memascend_jax.checkpoints.saved_step import StepRecord
from memascend_jax.dtypes import to_dtype
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.optim.state_format import state_format

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
#: So small that larger tensors have several chunks; the rows of 64 numbers that begin and end on blocks.
CHUNK_BYTES = 16384


def small_arrays(name: str = "fp32", chunk_bytes: int = CHUNK_BYTES) -> list[ArrayLayout]:
    return state_arrays(
        state_format(name, "bfloat16"), tensor_shapes(ModelConfig.from_hf(CONFIG)), chunk_bytes=chunk_bytes
    )


def random_values(arrays: list[ArrayLayout], seed: int = 0) -> dict[tuple[str, str], np.ndarray]:
    """Random bytes for every array, as finite numbers of its type."""
    rng = np.random.default_rng(seed)
    values = {}
    for array in arrays:
        if array.dtype.startswith("uint"):
            made = rng.integers(0, 256, array.elements * array.itemsize, np.uint8).view(to_dtype(array.dtype))
        else:
            made = np.abs(rng.standard_normal(array.elements, np.float32)).astype(to_dtype(array.dtype))
        values[array.group, array.tensor] = made
    return values


def streamed(arrays: list[ArrayLayout], values, files=None, piece: int = 4096) -> StreamedState:
    def stream(write) -> None:
        futures = []
        for (group, tensor), data in values.items():
            for start in range(0, data.size, piece):
                futures += write(group, tensor, start, data[start : start + piece])
        for future in futures:
            future.result()

    return StreamedState(arrays, stream, files or {})


def record(step: int, name: str = "fp32", **changes) -> StepRecord:
    made = {
        "step": step,
        "state_format": name,
        "param_dtype": "bfloat16",
        "model": CONFIG,
        "run_state": {"step": step, "tokens": 7, "results": {"loss_last": 1.5}},
        "run_id": None,
        "version": "0.0",
    }
    return StepRecord(**{**made, **changes})


def save_small(
    folder: Path, *steps: int, name: str = "fp32", files=None, **changes
) -> dict[tuple[str, str], np.ndarray]:
    """Saves ``steps``, all with the same values, and returns those."""
    arrays = small_arrays(name)
    values = random_values(arrays)
    with OrbaxSteps(folder, every=1, keep=10) as saver:
        for step in steps:
            saver.save(record(step, name, **changes), streamed(arrays, values, files), {})
    return values
