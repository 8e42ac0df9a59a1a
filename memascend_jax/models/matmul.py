# SPDX-License-Identifier: Apache-2.0
"""Products of low-precision operands that accumulate in float32, and ``linear`` built on them.

The rounding is the same whichever way a platform computes it fastest: operands in the compute dtype,
exact products, float32 sums, one rounding of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memascend_jax.errors import MachineError

#: Contracted and batch dimensions, as ``lax.dot_general`` takes them.
DotDims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Precision:
    """How this model computes: ``compute_dtype`` of activations and operands, and the way to multiply.

    ``upcast_operands`` widens the operands to float32 before a product. It changes no bit of an operand,
    and is faster on processors without bfloat16 instructions (a layer of SmolLM2 takes 0.72 of the time).

    ``contract_last`` turns the left operand so that what is summed over is its last axis: only there has XLA a product
    of bfloat16 on processors, twice as fast as the one in float32 that it takes else.
    """

    compute_dtype: Any
    upcast_operands: bool
    contract_last: bool = False

    def round(self, x: Array) -> Array:
        """Returns ``x`` in the compute dtype: see ``round_to``."""
        return round_to(x, self.compute_dtype)

    def dot(self, a: Array, b: Array, dims: DotDims) -> Array:
        """Returns the float32 product of ``a`` and ``b``, each rounded to the compute dtype first."""
        a, b = self.round(a), self.round(b)
        if self.contract_last:
            a, dims = _contracted_last(a, dims)
        if self.upcast_operands:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        exact = lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else None
        return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _contracted_last(a: Array, dims: DotDims) -> tuple[Array, DotDims]:
    """Returns ``a`` with its contracted axes last, where one free axis is behind them and can be cut in two.

    A plain transposition would be folded into the product, which is what XLA is slow at.
    """
    (of_a, of_b), (batch_a, batch_b) = dims
    n, free = len(batch_a), a.shape[-1]
    leading = tuple(range(n)), tuple(range(n, a.ndim - 1))
    piece = next((piece for piece in (64, 32, 16, 8, 4, 2) if free % piece == 0 and free > piece), None)
    if (batch_a, of_a) != leading or piece is None:
        return a, dims
    batch, contracted = a.shape[:n], a.shape[n:-1]
    cut = jnp.moveaxis(a.reshape(*batch, prod(contracted), free // piece, piece), n, -1)
    turned = cut.reshape(*batch, free, *contracted)
    return turned, ((tuple(range(n + 1, a.ndim)), of_b), (batch_a, batch_b))


def round_to(x: Array, dtype: Any) -> Array:
    """Returns ``x`` in ``dtype``, its values rounded even where XLA drops pairs of conversions.

    XLA keeps the float32 value wherever it is widened again, so that results would depend on what it happens to fuse,
    and float16 would overflow in some places only.
    """
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    elif x.dtype == jnp.float32 and dtype == jnp.float16:
        x = _to_float16_values(x)
    return x.astype(dtype)


@jax.custom_vjp
def _to_float16_values(x: Array) -> Array:
    """Returns float32 ``x`` rounded to values of float16; so is its gradient, as that of ``reduce_precision`` is."""
    # reduce_precision makes zeros of float16's denormals, which are the multiples of 2**-24 below 2**-14. The gradient
    # of this would be zero there, for that of round is.
    denormal = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return jnp.where(jnp.abs(x) < 2.0**-14, denormal, normal)


_to_float16_values.defvjp(
    lambda x: (_to_float16_values(x), None), lambda _, gradient: (_to_float16_values(gradient),)
)


def plan_precision(compute_dtype: str, platform: str | None = None) -> Precision:
    """Returns how to compute in ``compute_dtype`` (``bfloat16``, ``float16`` or ``float32``) on ``platform``.

    Args:
        compute_dtype: our name of the dtype of activations and matmul operands.
        platform: jax's name (``cpu``, ``gpu``); by default that of jax's default backend.

    Raises:
        MachineError: another dtype.
    """
    if compute_dtype not in ("bfloat16", "float16", "float32"):
        raise MachineError(
            f"cannot compute in {compute_dtype!r}: expected 'bfloat16', 'float16' or 'float32'"
        )
    on_cpu = (platform or jax.default_backend()) == "cpu"
    bf16_products = compute_dtype == "bfloat16" and on_cpu and _cpu_multiplies_bf16()
    # Of float16 XLA has no products on a processor that would be faster.
    slow = on_cpu and compute_dtype != "float32" and not bf16_products
    return Precision(jnp.dtype(compute_dtype), slow, bf16_products)


def _cpu_multiplies_bf16() -> bool:
    """Whether the processor has bfloat16 products (x86: AVX-512 or AMX; Arm: BF16 extension)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    words = set(flags.split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: Array, weight: Array, precision: Precision) -> Array:
    """Returns ``x @ weight.T`` in the compute dtype, for ``weight`` of shape ``[out, in]``.

    The gradient of ``weight`` keeps ``weight``'s dtype: a float32 weight whose values are bfloat16 yields
    the float32 sums, unrounded, at no cost, for XLA drops the conversion back to bfloat16.
    """
    return _linear_forward(x, weight, precision)[0]


def _linear_forward(x: Array, weight: Array, precision: Precision) -> tuple[Array, tuple[Array, Array]]:
    product = precision.dot(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return precision.round(product), (x, weight)


def _linear_backward(precision: Precision, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = saved
    dx = precision.dot(dy, weight, (((dy.ndim - 1,), (0,)), ((), ())))
    tokens = tuple(range(x.ndim - 1))
    dweight = precision.dot(dy, x, ((tokens, tokens), ((), ())))
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


linear.defvjp(_linear_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def biased_linear(x: Array, weight: Array, bias: Array, precision: Precision) -> Array:
    """Returns ``x @ weight.T + bias`` in the compute dtype, rounded once; gradients are as ``linear``'s."""
    return _biased_forward(x, weight, bias, precision)[0]


def _biased_forward(
    x: Array, weight: Array, bias: Array, precision: Precision
) -> tuple[Array, tuple[Array, Array, Array]]:
    product = precision.dot(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return precision.round(product + precision.round(bias).astype(jnp.float32)), (x, weight, bias)


def _biased_backward(
    precision: Precision, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, Array]:
    x, weight, bias = saved
    dx, dweight = _linear_backward(precision, (x, weight), dy)
    dbias = dy.astype(jnp.float32).sum(axis=tuple(range(dy.ndim - 1)))
    return dx, dweight, dbias.astype(bias.dtype)


biased_linear.defvjp(_biased_forward, _biased_backward)
