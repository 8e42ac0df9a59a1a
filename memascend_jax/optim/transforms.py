# SPDX-License-Identifier: Apache-2.0
"""optax's adamw, adam, lion and sgd, which an engine with fused kernels recognises.

Each function takes optax's arguments and returns optax's own transform, whose ``init`` and ``update`` work wherever
one is expected. Besides it carries a ``FusedUpdate``, where a kernel can do the same: with plain numbers (or schedules)
and moments in the dtype of the parameters. Anything else, such as ``mu_dtype`` or traced hyperparameters inside
``optax.inject_hyperparams``, is just optax.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from memascend_jax.optim.fused import FusedUpdate, Schedule

Mask = Any | Callable[[Any], Any] | None


class FusedTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transform that says which fused update it is; ``fused`` is None when it is none."""

    fused: FusedUpdate | None

    def __new__(
        cls, transform: optax.GradientTransformationExtraArgs, fused: FusedUpdate | None
    ) -> FusedTransformation:
        made: FusedTransformation = super().__new__(cls, transform.init, transform.update)
        made.fused = fused
        return made


def fused_description(tx: Any) -> FusedUpdate | None:
    """Returns the fused update that ``tx`` stands for, or None for a transform of any other kind."""
    fused = getattr(tx, "fused", None)
    return fused if isinstance(fused, FusedUpdate) else None


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: float | Schedule = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
) -> FusedTransformation:
    """Returns ``optax.adamw`` of the same arguments, recognised by ``memascend_jax.offload``.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101).

    Example:
        >>> import jax.numpy as jnp, memascend_jax
        >>> tx = memascend_jax.adamw(1e-3, weight_decay=0.1, mask={"w": True, "b": False})
        >>> state = tx.init({"w": jnp.ones((4, 4)), "b": jnp.zeros(4)})
    """
    plain = optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)
    return FusedTransformation(
        plain,
        None
        if mu_dtype is not None
        else _described(
            "adam", learning_rate, b1, b2, eps, eps_root, weight_decay, mask=mask, nesterov=nesterov
        ),
    )


def adam(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> FusedTransformation:
    """Returns ``optax.adam`` of the same arguments, recognised by ``memascend_jax.offload``.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (arXiv 1412.6980).
    """
    plain = optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return FusedTransformation(
        plain,
        None
        if mu_dtype is not None
        else _described("adam", learning_rate, b1, b2, eps, eps_root, nesterov=nesterov),
    )


def lion(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    weight_decay: float | Schedule = 1e-3,
    mask: Mask = None,
) -> FusedTransformation:
    """Returns ``optax.lion`` of the same arguments, recognised by ``memascend_jax.offload``.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """
    plain = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return FusedTransformation(
        plain,
        None
        if mu_dtype is not None
        else _described("lion", learning_rate, b1, b2, weight_decay=weight_decay, mask=mask),
    )


def sgd(
    learning_rate: float | Schedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
) -> FusedTransformation:
    """Returns ``optax.sgd`` of the same arguments, recognised by ``memascend_jax.offload``.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013).
    """
    plain = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    return FusedTransformation(
        plain,
        None
        if accumulator_dtype is not None
        else _described("sgd", learning_rate, momentum, nesterov=nesterov and momentum is not None),
    )


def _described(
    rule: Any,
    learning_rate: Any,
    b1: Any,
    b2: Any = 0.0,
    eps: Any = 0.0,
    eps_root: Any = 0.0,
    weight_decay: Any = 0.0,
    *,
    mask: Mask = None,
    nesterov: bool = False,
) -> FusedUpdate | None:
    """Returns the description, or None when one of the values is no plain number."""
    momentum, decay, epsilon, inner = (_number(value) for value in (b1, b2, eps, eps_root))
    rate, weight = (value if callable(value) else _number(value) for value in (learning_rate, weight_decay))
    if rate is None or weight is None or (b1 is not None and momentum is None):
        return None
    if decay is None or epsilon is None or inner is None:
        return None
    return FusedUpdate(
        rule,
        rate,
        b1=momentum,
        b2=decay,
        eps=epsilon,
        eps_root=inner,
        weight_decay=weight,
        mask=mask,
        nesterov=bool(nesterov),
    )


def _number(value: Any) -> float | None:
    """Returns ``value`` as a float where it is a number that is known now; a traced one is not."""
    if isinstance(value, numbers.Real | np.number):
        return float(value)
    if (
        isinstance(value, jax.Array | np.ndarray)
        and not isinstance(value, jax.core.Tracer)
        and not value.shape
    ):
        return float(value)
    return None
