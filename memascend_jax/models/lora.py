# SPDX-License-Identifier: Apache-2.0
"""A linear layer with a LoRA adapter beside it: ``y = x Wᵀ + s (x Aᵀ) Bᵀ``, rounded once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from memascend_jax.models.matmul import DotDims, Precision

#: ``[tokens, a] x [b, a]`` and ``[tokens, a] x [a, b]``, for ``[B, S, a]`` on the left.
_BY_COLUMNS: DotDims = (((2,), (1,)), ((), ()))
_BY_ROWS: DotDims = (((2,), (0,)), ((), ()))
#: ``[tokens, a] x [tokens, b] -> [a, b]``.
_BY_TOKENS: DotDims = (((0, 1), (0, 1)), ((), ()))


class Factor(nnx.Module):
    """One factor of an adapter, A ``[rank, in]`` or B ``[out, rank]``."""

    def __init__(self, rows: int, columns: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, columns)))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def adapted_linear(x: Array, weight: Array, a: Array, b: Array, scale: float, precision: Precision) -> Array:
    """Returns ``x Wᵀ + scale (x Aᵀ) Bᵀ`` in the compute dtype, for ``x [B, S, in]`` and ``weight [out, in]``.

    Products have float32 sums; ``x Aᵀ`` is rounded to the compute dtype, the sum of both parts once.
    """
    return _forward(x, weight, a, b, scale, precision)[0]


def _forward(
    x: Array, weight: Array, a: Array, b: Array, scale: float, precision: Precision
) -> tuple[Array, tuple[Array, ...]]:
    low = precision.round(precision.dot(x, a, _BY_COLUMNS))
    adapted = precision.dot(x, weight, _BY_COLUMNS) + scale * precision.dot(low, b, _BY_COLUMNS)
    return precision.round(adapted), (x, weight, a, b, low)


def _backward(
    scale: float, precision: Precision, saved: tuple[Array, ...], dy: Array
) -> tuple[Array, Array, Array, Array]:
    x, weight, a, b, low = saved
    dlow = precision.round(scale * precision.dot(dy, b, _BY_ROWS))
    dx = precision.dot(dy, weight, _BY_ROWS) + precision.dot(dlow, a, _BY_ROWS)
    # That of a frozen weight is asked for by nobody, and not computed then.
    dweight = precision.dot(dy, x, _BY_TOKENS)
    da = precision.dot(dlow, x, _BY_TOKENS)
    db = scale * precision.dot(dy, low, _BY_TOKENS)
    return dx.astype(x.dtype), dweight.astype(weight.dtype), da.astype(a.dtype), db.astype(b.dtype)


adapted_linear.defvjp(_forward, _backward)
