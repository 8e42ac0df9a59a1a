# SPDX-License-Identifier: Apache-2.0
"""The scaling of rotary positions that a GGUF file holds, as Hugging Face's settings say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.errors import DataError

#: ``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings`` of the models with scaling
#: ``llama3``: a file holds only the factors that follow from them.
_LLAMA3 = ((1.0, 4.0, 8192),)
_NEAR = 1e-4


def rope_settings(
    found: Mapping[str, Any], head_dim: int, read: Callable[[str], NDArray[np.float32] | None], where: str
) -> dict[str, Any]:
    """Returns the keys of ``rope_parameters``, ``rope_theta`` included.

    Args:
        found: metadata without the architecture before the keys.
        head_dim: elements of a head that are rotated.
        read: returns a tensor of factors by name, or None where there is none.

    Raises:
        DataError: factors that no known setting gives.
    """
    theta = found.get("rope.freq_base", 10000.0)
    settings: dict[str, Any] = {"rope_theta": theta}
    original = found.get("rope.scaling.original_context_length")
    long, short = read("rope_factors_long.weight"), read("rope_factors_short.weight")
    if long is not None and short is not None:
        return settings | {
            "rope_type": "longrope",
            "long_factor": _decimals(long),
            "short_factor": _decimals(short),
            "original_max_position_embeddings": original,
        }
    factors = read("rope_freqs.weight")
    if factors is not None and not np.all(factors == 1.0):
        return settings | _llama3(factors, theta, head_dim, where)
    kind = found.get("rope.scaling.type", "none")
    if kind == "none":
        return settings | {"rope_type": "default"}
    more = {"factor": found.get("rope.scaling.factor"), "original_max_position_embeddings": original}
    return (
        settings | {"rope_type": str(kind)} | {key: value for key, value in more.items() if value is not None}
    )


def _llama3(factors: NDArray[np.float32], theta: Any, head_dim: int, where: str) -> dict[str, Any]:
    factor = float(factors.max())
    for low, high, original in _LLAMA3:
        expected = llama3_factors(theta, head_dim, factor, low, high, original)
        if expected.shape == factors.shape and np.allclose(factors, expected, rtol=_NEAR):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise DataError(
        f"cannot use the model '{where}': its factors of rotary positions (rope_freqs.weight) are those of no known "
        "setting; use the model's Hugging Face folder"
    )


def llama3_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> NDArray[np.float32]:
    """Returns what the scaling ``llama3`` divides each of the ``head_dim / 2`` frequencies by."""
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave < original / high, 1.0, np.where(wave > original / low, factor, between)).astype(
        np.float32
    )


def _decimals(values: NDArray[np.float32]) -> list[float]:
    """The shortest decimals that are the same float32."""
    return [float(str(value)) for value in values]
