# SPDX-License-Identifier: Apache-2.0
"""AdamW on tiles in host memory, in one native pass.

    g     <- grad * grad_scale
    mu    <- b1 * mu + (1 - b1) * g
    nu    <- b2 * nu + (1 - b2) * g^2
    master <- master - lr * (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay * master)
    param <- round(master)

The order of operations is that of ``optax.adamw`` in fp32. Source: Loshchilov and Hutter,
"Decoupled Weight Decay Regularization" (arXiv 1711.05101).
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend_jax._native import _core


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of the whole run; the learning rate comes per step, the weight decay per tensor."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, slots=True)
class UpdateScale:
    """What one step's update is scaled by.

    Attributes:
        count: number of this update, from 1.
        learning_rate: the schedule's value for it.
        grad_scale: factor on every gradient: the clip's, 1.0 for none.
    """

    count: int
    learning_rate: float
    grad_scale: float


@dataclass(frozen=True, slots=True)
class TileAddresses:
    """Where one tile of each leaf lies in host memory; ``param`` is 0 when the master is the parameter."""

    master: int
    mu: int
    nu: int
    grad: int
    param: int
    n_elements: int


def update_tile(
    tile: TileAddresses,
    hyper: AdamW,
    scale: UpdateScale,
    *,
    grad_dtype: str,
    param_dtype: str,
    weight_decay: float,
) -> None:
    """Updates one tile in place; releases the GIL. The tile's memory must stay leased meanwhile."""
    _core.fused_update(
        kernel="adam",
        param=tile.master,
        mu=tile.mu,
        nu=tile.nu,
        grad=tile.grad,
        n=tile.n_elements,
        grad_dtype=grad_dtype,
        rounded=tile.param,
        rounded_dtype=param_dtype if tile.param else "",
        lr=scale.learning_rate,
        b1=hyper.b1,
        b2=hyper.b2,
        eps=hyper.eps,
        weight_decay=weight_decay,
        bias1=1.0 - hyper.b1**scale.count,
        bias2=1.0 - hyper.b2**scale.count,
        grad_scale=scale.grad_scale,
    )
