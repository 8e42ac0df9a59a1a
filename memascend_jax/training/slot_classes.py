# SPDX-License-Identifier: Apache-2.0
"""The pool's size classes by name, shared by the plan that sizes them and the placements that lease them. Pure."""

from __future__ import annotations

import math

from memascend_jax.memory.pool import SizeClass
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.units import round_up

SPOOL = "spool"
UPDATE = "update"
GRADIENTS = "gradients"
INPUTS = "inputs"


def part_class(kind: str, nbytes: int) -> str:
    """Returns the class of stage parts of ``kind`` that need ``nbytes``."""
    return f"{kind}:{nbytes}"


def memory_classes(layout: ModelLayout) -> dict[str, SizeClass]:
    """Returns one size class per tensor and leaf, each with the single slot that holds it for the whole run."""
    return {
        name: SizeClass(round_up(elements * itemsize(dtype), BLOCK_BYTES), 1)
        for name, (elements, dtype) in memory_contents(layout).items()
    }


def memory_contents(layout: ModelLayout) -> dict[str, tuple[int, str]]:
    """Returns elements and dtype of every array that the placement ``memory`` keeps, by name."""
    contents: dict[str, tuple[int, str]] = {}
    fmt = layout.format
    for tensor in layout.tensors:
        elements = math.prod(tensor.shape)
        if tensor.name == layout.head_tensor:
            # The last vocabulary tile is as long as the others in memory; its padding stays zero.
            padded = layout.head_rows * layout.n_head_tiles * layout.config.hidden_size
            contents[tensor.name] = max(elements, padded), fmt.param_dtype
        else:
            contents[tensor.name] = elements, fmt.param_dtype
        for leaf, dtype in fmt.leaves:
            contents[tensor.name + leaf] = elements, dtype
        contents[gradient_name(tensor.name)] = elements, fmt.grad_dtype
    return contents


def gradient_name(tensor: str) -> str:
    """Returns the name under which a gradient is kept in memory."""
    return tensor + "#grad"
