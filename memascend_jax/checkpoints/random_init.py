# SPDX-License-Identifier: Apache-2.0
"""Random weights as Hugging Face begins with: normal matrices, norms of one, biases of zero; PEFT a LoRA adapter.

Each block of ``BLOCK`` elements has a random stream of its own, keyed by (seed, name) and counted by block,
so that a tensor's values depend neither on the size of the pieces nor on the order of the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.source import PIECE_BYTES
from memascend_jax.errors import DataError
from memascend_jax.models.adapters import LORA_B
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes

BLOCK = 1 << 16


def random_pieces(
    config: ModelConfig, name: str, seed: int, max_bytes: int = PIECE_BYTES
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yields ``(first element, flat float32 values)`` of the tensor ``name``, at least a block at a time.

    Raises:
        DataError: the model has no tensor of this name.
    """
    tensor = next((tensor for tensor in tensor_shapes(config) if tensor.name == name), None)
    if tensor is None:
        raise DataError(f"cannot initialise '{name}': the model has no tensor of this name")
    step = max(1, max_bytes // (4 * BLOCK)) * BLOCK
    for start in range(0, tensor.elements, step):
        count = min(step, tensor.elements - start)
        if len(tensor.shape) == 1:
            # Norms multiply by one at first, biases add nothing.
            first = 0.0 if name.endswith(".bias") else 1.0 - config.norm_offset
            yield start, np.full(count, first, np.float32)
        else:
            yield start, _normal(name, seed, start, count) * np.float32(config.initializer_range)


def new_factor(
    name: str, shape: tuple[int, ...], seed: int, init: Literal["kaiming", "gaussian"]
) -> NDArray[np.float32]:
    """Returns a LoRA factor of ``shape`` as PEFT initialises it: B zeros, A ``[rank, in]`` random.

    ``kaiming``: uniform within 1 / sqrt(in), which is Kaiming's bound for a = sqrt(5); ``gaussian``: normal with a
    deviation of 1 / rank.
    """
    if name.endswith(LORA_B):
        return np.zeros(shape, np.float32)
    rank, columns = shape
    values = np.empty(rank * columns, np.float32)
    for start in range(0, values.size, BLOCK):
        block, stream = values[start : start + BLOCK], _stream(name, seed, start // BLOCK)
        if init == "gaussian":
            stream.standard_normal(out=block, dtype=np.float32)
            block /= np.float32(rank)
        else:
            stream.random(out=block, dtype=np.float32)
            block[:] = (2 * block - 1) * np.float32(columns**-0.5)
    return values.reshape(shape)


def _normal(name: str, seed: int, start: int, count: int) -> NDArray[np.float32]:
    """``count`` standard normal values from element ``start``, a multiple of the block."""
    values = np.empty(count, np.float32)
    for first in range(0, count, BLOCK):
        block = values[first : first + BLOCK]
        _stream(name, seed, (start + first) // BLOCK).standard_normal(out=block, dtype=np.float32)
    return values


def _stream(name: str, seed: int, block: int) -> np.random.Generator:
    """What a block of a tensor is drawn from."""
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], np.uint64)
    # The block's number is in the counter's third word: no stream draws as many as 2^128 numbers.
    counter = np.array([0, 0, block, 0], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
