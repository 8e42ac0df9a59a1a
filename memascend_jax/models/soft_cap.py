# SPDX-License-Identifier: Apache-2.0
"""The soft cap of scores and logits (Gemma 2): ``cap * tanh(x / cap)``, and its derivative from its value."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def soft_capped(x: Array, cap: float) -> Array:
    """Returns ``cap * tanh(x / cap)``."""
    return jnp.tanh(x / cap) * cap


def soft_cap_slope(capped: Array, cap: float) -> Array:
    """Returns the derivative of ``soft_capped`` where its value is ``capped``."""
    return 1.0 - jnp.square(capped / cap)
