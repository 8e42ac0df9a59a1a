# SPDX-License-Identifier: Apache-2.0
"""The pool's size classes by name, shared by the plan that sizes them and the placements that lease them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from memascend_jax.memory.pool import SizeClass
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.residency import early_tensors, gradient_offsets
from memascend_jax.training.stage_schedule import LAYER, NORM
from memascend_jax.units import round_up

SPOOL = "spool"
UPDATE = "update"
GRADIENTS = "gradients"
INPUTS = "inputs"
ROW_GRADIENTS = "gradients:rows"

#: Elements and dtype of arrays that are kept in memory, by name.
MemoryContents = Mapping[str, tuple[int, str]]


def part_class(kind: str, nbytes: int) -> str:
    """Returns the class of stage parts of ``kind`` that need ``nbytes``."""
    return f"{kind}:{nbytes}"


def memory_classes(layout: ModelLayout) -> dict[str, SizeClass]:
    """Returns one size class per tensor and leaf, each with the single slot that holds it for the whole run."""
    return _whole_classes(memory_contents(layout))


def host_classes(layout: ModelLayout, *, early_update: bool) -> dict[str, SizeClass]:
    """Returns the classes of ``host_contents``, and of the gradients that it leaves out.

    Layers' gradients, where they are updated early, need room for two layers: one is updated while the next arrives.
    """
    classes = _whole_classes(host_contents(layout, early_update=early_update))
    if has_row_gradients(layout):
        largest = max(
            gradient_offsets(layout, group)[1]
            for group in layout.update_groups
            if group.pieces[0].tensor == EMBED_NAME
        )
        classes[ROW_GRADIENTS] = SizeClass(largest, 1)
    if early_update:
        passing = Counter(_gradient_bytes(layout, tensor) for tensor in early_tensors(layout))
        for nbytes, tensors in passing.items():
            moving = min(tensors, 2 * _most_in_a_stage(layout, nbytes))
            classes[gradient_class(nbytes)] = SizeClass(round_up(nbytes, BLOCK_BYTES), moving)
    return classes


def has_row_gradients(layout: ModelLayout) -> bool:
    """Returns whether the embedding's gradient is rows alone: of an untied one that is trained."""
    return not layout.tied and layout.is_trained(EMBED_NAME)


def _most_in_a_stage(layout: ModelLayout, nbytes: int) -> int:
    """Returns how many gradients of ``nbytes`` a layer, or the final norm, has at most."""
    keys = (key for key in layout.stage_parts if key.kind in (LAYER, NORM))
    return max(
        sum(_gradient_bytes(layout, part.tensor) == nbytes for part in layout.trained_parts(key))
        for key in keys
    )


def host_contents(layout: ModelLayout, *, early_update: bool) -> dict[str, tuple[int, str]]:
    """Returns what the placement ``host`` keeps: as ``memory_contents``, but no gradient that can do with less.

    That of an untied embedding is rows, needed whole only tile by tile; those of layers are short-lived when they are
    updated early.
    """
    without = set(early_tensors(layout)) if early_update else set()
    if has_row_gradients(layout):
        without.add(EMBED_NAME)
    left_out = {gradient_name(tensor) for tensor in without}
    return {name: what for name, what in memory_contents(layout).items() if name not in left_out}


def gradient_class(nbytes: int) -> str:
    """Returns the class of whole gradients of ``nbytes`` that pass through the placement ``host``."""
    return part_class(GRADIENTS, nbytes)


def _gradient_bytes(layout: ModelLayout, tensor: str) -> int:
    return math.prod(layout.shape_of(tensor)) * itemsize(layout.format.grad_dtype)


def _whole_classes(contents: MemoryContents) -> dict[str, SizeClass]:
    return {
        name: SizeClass(round_up(elements * itemsize(dtype), BLOCK_BYTES), 1)
        for name, (elements, dtype) in contents.items()
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
        for leaf in layout.leaves_of(tensor.name):
            values = leaf.total(elements, layout.tile_elements[tensor.name])
            contents[tensor.name + leaf.suffix] = values, leaf.dtype
        if layout.is_trained(tensor.name):
            contents[gradient_name(tensor.name)] = elements, fmt.grad_dtype
    return contents


def gradient_name(tensor: str) -> str:
    """Returns the name under which a gradient is kept in memory."""
    return tensor + "#grad"
