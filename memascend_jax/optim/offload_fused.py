# SPDX-License-Identifier: Apache-2.0
"""Which leaves a fused kernel updates, and the update of one piece of such a leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from memascend_jax.memory.pool import Lease
from memascend_jax.optim.fused import FusedTile, FusedUpdate, StepNumbers, update_fused_tile
from memascend_jax.optim.offload_layout import Piece
from memascend_jax.optim.offload_leaf import LeafUpdate
from memascend_jax.optim.offload_trace import TracedTransform
from memascend_jax.storage.engine import address_of

_GRADIENTS = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class FusedLeaf:
    """A leaf that a kernel updates: its moments by the kernel's names, and whether its weight decays."""

    update: FusedUpdate
    moments: tuple[tuple[str, int], ...]
    decayed: bool


def fused_leaves(
    fused: FusedUpdate | None, traced: TracedTransform, updates: Sequence[LeafUpdate], params: Any
) -> dict[int, FusedLeaf]:
    """Returns the leaves that the kernels can update: those that are float32 and have float32 moments."""
    if fused is None:
        return {}
    decayed = _decayed(fused.mask, params, traced)
    found: dict[int, FusedLeaf] = {}
    for update in updates:
        moments = {traced.head(state, update.leaf).rpartition("/")[2]: state for state in update.states}
        fits = (
            not update.frozen
            and update.elementwise
            and traced.leaf_shapes[update.leaf].dtype == np.float32
            and update.update_dtype == np.float32
            and tuple(moments) == fused.state_leaves
            and all(traced.state_shapes[state].dtype == np.float32 for state in update.states)
        )
        if fits:
            found[update.leaf] = FusedLeaf(fused, tuple(moments.items()), decayed[update.leaf])
    return found


def takes_gradient(dtype: Any) -> bool:
    """Returns whether the kernels read gradients of this type."""
    return np.dtype(dtype).name in _GRADIENTS


def update_piece(
    leaf: FusedLeaf,
    numbers: StepNumbers,
    piece: Piece,
    lease: Lease | None,
    grad: NDArray[Any],
    param: NDArray[np.float32],
) -> None:
    """Updates ``param`` and the moments in the slot, in place."""
    grad = np.ascontiguousarray(grad)
    addresses = {}
    for name, state in leaf.moments:
        region = piece.region(state)
        assert region is not None and lease is not None
        addresses["nu" if name == "nu" else "mu"] = lease.address + region.offset
    tile = FusedTile(
        param=address_of(param),
        grad=address_of(grad),
        n_elements=piece.n_elements,
        mu=addresses.get("mu", 0),
        nu=addresses.get("nu", 0),
        grad_dtype=grad.dtype.name,
    )
    update_fused_tile(leaf.update, numbers, tile, decayed=leaf.decayed)


def _decayed(mask: Any, params: Any, traced: TracedTransform) -> list[bool]:
    """Returns for each leaf whether optax's ``mask`` lets its weight decay."""
    if mask is None:
        return [True] * traced.n_leaves
    tree: Any = jax.tree.structure(params)
    shapes = tree.unflatten(traced.leaf_shapes)
    prefix = mask(shapes) if callable(mask) else mask
    spread = jax.tree.map(lambda keep, part: jax.tree.map(lambda _: bool(keep), part), prefix, shapes)
    return [bool(keep) for keep in jax.tree.leaves(spread)]
