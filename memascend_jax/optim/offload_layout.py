# SPDX-License-Identifier: Apache-2.0
"""Where an offloaded state lies: tensors in the store, pieces of leaves in slots, groups of pieces that move together.

Pure. An elementwise leaf is cut into tiles, any other is one piece. Small pieces share a slot, so that a leaf of a few
numbers does not cost a turn of the disk by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memascend_jax.dtypes import dtype_name
from memascend_jax.errors import ConfigError
from memascend_jax.memory.pool import SizeClass
from memascend_jax.optim.offload_leaf import LeafUpdate, is_streamed
from memascend_jax.optim.offload_trace import TracedTransform
from memascend_jax.optim.state_format import itemsize, tile_elements
from memascend_jax.storage.tensor_store import TensorSpec
from memascend_jax.units import round_up

#: Stands for the parameter among a piece's regions.
PARAMETER = -1
TILE, LEAF = "tile", "leaf"
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Region:
    """A run of a stored tensor within a slot.

    Attributes:
        state: index of the state array, or ``PARAMETER``.
        offset: byte within the slot.
        tiles: (tile, byte within the region) of each of the tensor's tiles in it.
        reads, writes: whether an update needs the old value, and makes a new one.
    """

    state: int
    tensor: str
    dtype: str
    offset: int
    start: int
    n_elements: int
    tiles: tuple[tuple[int, int], ...]
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, start + n_elements)`` of a flattened leaf, or all of it in its true shape."""

    leaf: int
    start: int
    n_elements: int
    whole: bool
    regions: tuple[Region, ...]

    def region(self, state: int) -> Region | None:
        """Returns the region of a state array or of the parameter; None when it is not in the slot."""
        return next((region for region in self.regions if region.state == state), None)


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces that are read, updated and written together in one slot of ``size_class``."""

    pieces: tuple[Piece, ...]
    size_class: str

    def __str__(self) -> str:
        return f"{len(self.pieces)} pieces from leaf {self.pieces[0].leaf}"


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """All of it: ``specs`` of the state's tensors by state array, the groups in order, the slots that they need."""

    specs: Mapping[int, TensorSpec]
    groups: tuple[Group, ...]
    classes: Mapping[str, SizeClass]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on SSD, one place each."""
        return sum(math.prod(spec.shape) * itemsize(spec.dtype) for spec in self.specs.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(size.nbytes * size.count for size in self.classes.values())


def plan_layout(
    traced: TracedTransform,
    updates: Sequence[LeafUpdate],
    stored_params: Mapping[int, TensorSpec],
    *,
    target_elements: int,
    slots: int,
    prefix: str,
) -> OffloadLayout:
    """Returns the layout.

    Args:
        stored_params: the parameters that lie in the store, by leaf.
        target_elements: a tile has about as many.
        slots: how many slots of a class; an update holds no more of the state in host memory.
        prefix: what the names of the state's tensors begin with.
    """
    specs: dict[int, TensorSpec] = {}
    pieces: list[Piece] = []
    for update in updates:
        if update.frozen:
            continue
        stored = stored_params.get(update.leaf)
        tile = _tile_of(traced, update.leaf, stored, target_elements)
        names = _names(traced, update, prefix)
        for state in update.states:
            if is_streamed(traced, state):
                specs[state] = _spec(traced, state, names[state], tile, update.elementwise, target_elements)
        pieces += _pieces(traced, update, specs, stored, tile)
    sizes = [_nbytes(piece) for piece in pieces]
    tiles = [size for size, piece in zip(sizes, pieces, strict=True) if not piece.whole]
    # Without tiles the leaves are what streams, and the largest sets the size.
    tile_bytes = max(tiles, default=max(sizes, default=0))
    groups = _groups(pieces, sizes, tile_bytes)
    return OffloadLayout(specs, tuple(groups), _classes(groups, sizes, tile_bytes, slots))


def _tile_of(traced: TracedTransform, leaf: int, stored: TensorSpec | None, target: int) -> int:
    shape = traced.leaf_shapes[leaf].shape
    if stored is None:
        return tile_elements(shape, target)
    return stored.tile_elements or max(math.prod(shape), 1)


def _spec(
    traced: TracedTransform, state: int, name: str, tile: int, elementwise: bool, target: int
) -> TensorSpec:
    shape = traced.state_shapes[state]
    try:
        dtype = dtype_name(shape.dtype)
    except ValueError:
        raise ConfigError(
            f"cannot offload the state '{traced.state_paths[state]}': the store keeps no {shape.dtype}"
        ) from None
    return TensorSpec(
        name, dtype, shape.shape, tile_elements=tile if elementwise else tile_elements(shape.shape, target)
    )


def _names(traced: TracedTransform, update: LeafUpdate, prefix: str) -> dict[int, str]:
    """A parameter's path, ``#``, and what optax calls the array: its last key where that is enough."""
    path = traced.leaf_paths[update.leaf]
    heads = {state: traced.head(state, update.leaf) for state in update.states}
    last = Counter(head.rpartition("/")[2] for head in heads.values())
    base = prefix + (path or "param")
    return {
        state: f"{base}#{head if last[head.rpartition('/')[2]] > 1 else head.rpartition('/')[2]}"
        for state, head in heads.items()
    }


def _pieces(
    traced: TracedTransform,
    update: LeafUpdate,
    specs: Mapping[int, TensorSpec],
    stored: TensorSpec | None,
    tile: int,
) -> list[Piece]:
    leaf, total = update.leaf, math.prod(traced.leaf_shapes[update.leaf].shape)
    streamed = [state for state in update.states if state in specs]
    used = set(update.inputs)

    def regions(start: int, n_elements: int) -> tuple[Region, ...]:
        made: list[Region] = []
        offset = 0
        for state in streamed:
            count = n_elements if update.elementwise else math.prod(specs[state].shape)
            reads = traced.state_input(state) in used
            region = _region(state, specs[state], offset, start, count, reads, state in update.changed)
            made.append(region)
            offset += _room(region)
        if stored is not None:
            made.append(_region(PARAMETER, stored, offset, start, n_elements, True, True))
        return tuple(made)

    if not update.elementwise:
        return [Piece(leaf, 0, total, True, regions(0, total))]
    return [
        Piece(leaf, start, min(tile, total - start), False, regions(start, min(tile, total - start)))
        for start in range(0, total, tile)
    ]


def _region(
    state: int, spec: TensorSpec, offset: int, start: int, n_elements: int, reads: bool, writes: bool
) -> Region:
    per_tile = spec.tile_elements or max(n_elements, 1)
    size = itemsize(spec.dtype)
    tiles = tuple(
        (first // per_tile, (first - start) * size) for first in range(start, start + n_elements, per_tile)
    )
    return Region(state, spec.name, spec.dtype, offset, start, n_elements, tiles, reads, writes)


def _room(region: Region) -> int:
    return round_up(region.n_elements * itemsize(region.dtype), _ALIGNMENT)


def _nbytes(piece: Piece) -> int:
    return sum(_room(region) for region in piece.regions)


def _groups(pieces: Sequence[Piece], sizes: Sequence[int], tile_bytes: int) -> list[Group]:
    groups: list[Group] = []
    gathered: list[Piece] = []
    filled = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if gathered and filled + size > tile_bytes:
            groups.append(Group(tuple(gathered), TILE))
            gathered, filled = [], 0
        if size > tile_bytes:
            groups.append(Group((piece,), LEAF))
        else:
            gathered.append(_moved(piece, filled))
            filled += size
    if gathered:
        groups.append(Group(tuple(gathered), TILE))
    return groups


def _moved(piece: Piece, by: int) -> Piece:
    return replace(
        piece, regions=tuple(replace(region, offset=region.offset + by) for region in piece.regions)
    )


def _classes(
    groups: Sequence[Group], sizes: Sequence[int], tile_bytes: int, slots: int
) -> dict[str, SizeClass]:
    found = Counter(group.size_class for group in groups)
    largest = {TILE: tile_bytes, LEAF: max(sizes, default=0)}
    return {
        name: SizeClass(max(largest[name], _ALIGNMENT), min(slots, count)) for name, count in found.items()
    }
