# SPDX-License-Identifier: Apache-2.0
"""Products of low-precision operands that accumulate in float32, and ``linear`` built on them.

The rounding is the same whichever way a platform computes it fastest: operands in the compute dtype,
exact products, float32 sums, one rounding of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
    """

    compute_dtype: Any
    upcast_operands: bool

    def round(self, x: Array) -> Array:
        """Returns ``x`` in the compute dtype, its values rounded even where XLA drops pairs of conversions.

        Without ``reduce_precision`` XLA keeps the float32 value wherever it is widened again, so that
        results would depend on what it happens to fuse.
        """
        if x.dtype == jnp.float32 and self.compute_dtype == jnp.bfloat16:
            x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x.astype(self.compute_dtype)

    def dot(self, a: Array, b: Array, dims: DotDims) -> Array:
        """Returns the float32 product of ``a`` and ``b``, each rounded to the compute dtype first."""
        a, b = self.round(a), self.round(b)
        if self.upcast_operands:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        exact = lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else None
        return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def plan_precision(compute_dtype: str, platform: str | None = None) -> Precision:
    """Returns how to compute in ``compute_dtype`` (``bfloat16`` or ``float32``) on ``platform``.

    Args:
        compute_dtype: our name of the dtype of activations and matmul operands.
        platform: jax's name (``cpu``, ``gpu``); by default that of jax's default backend.

    Raises:
        MachineError: another dtype.
    """
    if compute_dtype not in ("bfloat16", "float32"):
        raise MachineError(f"cannot compute in {compute_dtype!r}: expected 'bfloat16' or 'float32'")
    platform = platform or jax.default_backend()
    narrow = compute_dtype == "bfloat16"
    return Precision(jnp.dtype(compute_dtype), narrow and platform == "cpu" and not _cpu_multiplies_bf16())


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
