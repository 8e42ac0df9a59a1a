# SPDX-License-Identifier: Apache-2.0
"""The first contents of the training state: parameters and masters from a checkpoint, moments zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import DataError
from memascend_jax.optim.rounding import round_master, split_master, widen
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.placement import Placement

Pieces = Iterator[tuple[int, NDArray[Any]]]


def initialise_state(
    layout: ModelLayout,
    placement: Placement,
    pieces_of: Callable[[str], Iterable[tuple[int, NDArray[Any]]]],
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes every parameter and, of what is trained, every state leaf; holds one tile at a time.

    Args:
        pieces_of: yields ``(start element, flat values)`` of a tensor in order, in pieces of any size.
        on_tensor: called after each tensor, for progress.

    Raises:
        DataError: a tensor's pieces are fewer or more elements than its shape.
    """
    for tensor in layout.tensors:
        total, size = math.prod(tensor.shape), layout.tile_elements[tensor.name]
        for start, values in cut_into_tiles(tensor.name, pieces_of(tensor.name), total, size):
            if not layout.is_trained(tensor.name):
                placement.write(tensor.name, start, round_master(widen(values), layout.format.param_dtype))
                continue
            parameter, kept = split_master(layout.format, widen(values))
            placement.write(tensor.name, start, parameter)
            for leaf in layout.format.leaves:
                first, n = leaf.span(start // size, total, size)
                zeros = np.zeros(n, to_dtype(leaf.dtype)) if leaf.suffix not in kept else kept[leaf.suffix]
                placement.write(tensor.name + leaf.suffix, first, zeros)
        on_tensor(tensor.name)


def cut_into_tiles(
    name: str, pieces: Iterable[tuple[int, NDArray[Any]]], total: int, size: int
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields ``(start, values)`` of exactly ``size`` elements, the last one shorter, from pieces of any size."""
    held: list[NDArray[Any]] = []
    n_held = start = 0
    for _, piece in pieces:
        flat = piece.reshape(-1)
        while flat.size:
            taken = flat[: min(size, total - start) - n_held]
            if not taken.size:
                raise DataError(f"tensor '{name}' has more than the {total:,} elements of its shape")
            held.append(taken)
            n_held += taken.size
            flat = flat[taken.size :]
            if n_held == min(size, total - start):
                yield start, held[0] if len(held) == 1 else np.concatenate(held)
                start += n_held
                held, n_held = [], 0
    if start != total:
        raise DataError(f"tensor '{name}' ended after {start + n_held:,} of {total:,} elements")
