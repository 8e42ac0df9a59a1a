# SPDX-License-Identifier: Apache-2.0
"""AdamW on tiles in host memory, in one native pass, for each state format.

    g      <- grad * grad_scale
    mu     <- b1 * mu + (1 - b1) * g
    nu     <- b2 * nu + (1 - b2) * g^2
    master <- master - lr * (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay * master)
    param  <- round(master)

The order of operations is that of ``optax.adamw`` in fp32, on what the format's leaves decode to. Source: Loshchilov
and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.optim.fused import FusedTile, FusedUpdate, StepNumbers, update_fused_tile
from memascend_jax.optim.state_format import MASTER, MU, NU, RESIDUAL, SCALES, StateFormat


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
        grad_scale: factor on every gradient: the clip's over the loss scale, 1.0 for none.
    """

    count: int
    learning_rate: float
    grad_scale: float


@dataclass(frozen=True, slots=True)
class TileMemory:
    """Where one tile, or rows that lie together, are in host memory.

    Attributes:
        param, grad: addresses of ``n_elements`` parameters and gradients.
        leaves: address of each leaf of the format, by suffix.
        row_blocks: of rows, how many blocks of scales each has.
    """

    param: int
    grad: int
    leaves: Mapping[str, int]
    n_elements: int
    row_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What stochastic rounding draws by, so that it does not matter how a tensor is cut.

    Attributes:
        key: of seed, step and tensor: see ``draw_key``.
        first_element: position of the tile in the flattened tensor.
        row_starts: ``[rows]`` int64, position of each row when rows are updated that lie apart in the tensor.
    """

    key: int
    first_element: int = 0
    row_starts: NDArray[np.int64] | None = None


def draw_key(seed: int, step: int, tensor: str) -> int:
    """Returns the 64-bit key of everything that is drawn for ``tensor`` in the update of ``step``."""
    digest = hashlib.blake2b(f"{seed}\0{step}\0{tensor}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def update_tile(
    fmt: StateFormat,
    memory: TileMemory,
    hyper: AdamW,
    scale: UpdateScale,
    draws: Draws,
    *,
    weight_decay: float,
) -> None:
    """Updates one tile in place; releases the GIL. The tile's memory must stay leased meanwhile.

    With ``draws.row_starts`` the parameters are those that the rows' tiles get; the moments are not to be kept.
    """
    numbers = StepNumbers(
        learning_rate=scale.learning_rate,
        weight_decay=weight_decay,
        bias1=1.0 - hyper.b1**scale.count,
        bias1_next=1.0,
        bias2=1.0 - hyper.b2**scale.count,
        grad_scale=scale.grad_scale,
    )
    if fmt.is_compact:
        _update_compact(fmt, memory, hyper, numbers, draws)
        return
    tile = FusedTile(
        param=memory.leaves.get(MASTER, memory.param),
        grad=memory.grad,
        n_elements=memory.n_elements,
        mu=memory.leaves[MU],
        nu=memory.leaves[NU],
        rounded=memory.param if fmt.has_master else 0,
        grad_dtype=fmt.grad_dtype,
        rounded_dtype=fmt.param_dtype if fmt.has_master else "",
    )
    rule = FusedUpdate("adam", scale.learning_rate, hyper.b1, hyper.b2, hyper.eps)
    update_fused_tile(rule, numbers, tile)


def _update_compact(
    fmt: StateFormat, memory: TileMemory, hyper: AdamW, numbers: StepNumbers, draws: Draws
) -> None:
    leaves = memory.leaves
    _core.compact_update(
        state_format=fmt.name,
        param=memory.param,
        residual=leaves.get(RESIDUAL, 0),
        mu=leaves[MU],
        nu=leaves[NU],
        scales=leaves.get(SCALES, 0),
        grad=memory.grad,
        n=memory.n_elements,
        grad_dtype=fmt.grad_dtype,
        first_element=draws.first_element,
        random_key=draws.key,
        row_starts=draws.row_starts,
        row_blocks=memory.row_blocks,
        lr=numbers.learning_rate,
        b1=hyper.b1,
        b2=hyper.b2,
        eps=hyper.eps,
        weight_decay=numbers.weight_decay,
        bias1=numbers.bias1,
        bias2=numbers.bias2,
        grad_scale=numbers.grad_scale,
    )
