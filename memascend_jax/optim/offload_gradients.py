# SPDX-License-Identifier: Apache-2.0
"""The look at all gradients before a step changes anything: the global norm, and who is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.storage.engine import address_of

_NATIVE = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """``norm``: the square root of the sum of all squares. ``nonfinite``: indices of gradients with inf or nan."""

    norm: float
    nonfinite: tuple[int, ...]


def look_at(gradients: Sequence[Any]) -> GradientFacts:
    """Returns the facts of ``gradients``, jax or numpy arrays, without temporaries in host memory.

    Each gradient's sum of squares is its own; they are added in float64 in the given order, so that the norm does not
    depend on where the gradients are.
    """
    # On a device all are under way before the first is waited for.
    started = [_on_device(array) if _is_elsewhere(array) else None for array in gradients]
    squares: list[float] = []
    nonfinite: list[int] = []
    for index, (array, pending) in enumerate(zip(gradients, started, strict=True)):
        square, bad = _in_memory(np.asarray(array)) if pending is None else _arrived(pending)
        squares.append(square)
        if bad:
            nonfinite.append(index)
    return GradientFacts(math.sqrt(math.fsum(squares)) if not nonfinite else math.nan, tuple(nonfinite))


def is_finite(array: NDArray[Any]) -> bool:
    """Returns whether no element of ``array``, in host memory, is inf or nan."""
    return not _in_memory(array)[1]


def _is_elsewhere(array: Any) -> bool:
    return isinstance(array, jax.Array) and any(device.platform != "cpu" for device in array.devices())


def _in_memory(array: NDArray[Any]) -> tuple[float, bool]:
    if array.size == 0:
        return 0.0, False
    if array.dtype.name in _NATIVE:
        flat = np.ascontiguousarray(array)
        return _core.norm_squared(address_of(flat), flat.size, array.dtype.name)
    wide = array.astype(np.float64, copy=False)
    return float(np.vdot(wide, wide)), not bool(np.isfinite(wide).all())


def _arrived(pending: tuple[jax.Array, jax.Array]) -> tuple[float, bool]:
    return float(pending[0]), not bool(pending[1])


@jax.jit
def _on_device(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = array.astype(jnp.float32)
    return jnp.sum(jnp.square(wide)), jnp.isfinite(wide).all()
