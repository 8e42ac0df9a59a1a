# SPDX-License-Identifier: Apache-2.0
"""How much disk a store takes: pure arithmetic, used before anything is created and by the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memascend_jax.errors import StoreError
from memascend_jax.storage.catalog import HEADER_BYTES, CatalogSize
from memascend_jax.storage.layout import (
    STRIPE_BYTES,
    Geometry,
    check_block_bytes,
    check_weights,
    plan_geometry,
)
from memascend_jax.storage.spec import TensorLayout, TensorSpec, layouts_of
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.whole_number import whole_number
from memascend_jax.units import KIB, MIB, parse_bytes, round_up

#: Room in every catalog for the run state and for tensors declared later.
_SPARE_CATALOG_BYTES = 256 * KIB
#: Bytes of catalog per tensor besides its name: record, shape, slice, padding.
_TENSOR_RECORD_BYTES = 512
_MAX_GUESSED_CATALOG_BYTES = 64 * MIB
#: A capacity full of tensors of one block, two places each, has a record of 128 bytes per 8 KiB.
_CAPACITY_PER_CATALOG_BYTE = 64


def bytes_needed(
    specs: Sequence[TensorSpec],
    scratch_bytes: int = 0,
    durability: Durability = "step",
    *,
    block_bytes: int = 4096,
    weights: Sequence[int] = (1,),
    catalog_bytes: int | None = None,
) -> int:
    """Returns the bytes on disk, all members together, of a store created for ``specs`` and ``scratch_bytes``."""
    geometry = plan_store(
        layouts_of(specs, block_bytes),
        capacity=None,
        scratch_bytes=scratch_bytes,
        durability=durability,
        block_bytes=block_bytes,
        weights=weights,
        catalog_bytes=catalog_bytes,
        members=len(weights),
    )
    return geometry.total_bytes()


def data_bytes_needed(layouts: Iterable[TensorLayout], durability: Durability) -> int:
    """Returns the bytes of all places of all tensors."""
    return sum(
        layout.place_bytes * (2 if durability == "step" and layout.spec.mutable else 1) for layout in layouts
    )


def plan_store(
    layouts: Sequence[TensorLayout],
    *,
    capacity: int | str | None,
    scratch_bytes: int,
    durability: Durability,
    block_bytes: int,
    weights: Sequence[int],
    catalog_bytes: int | None,
    members: int,
) -> Geometry:
    """Returns the geometry of a store with room for ``layouts`` and scratch.

    Raises:
        StoreError: the capacity is too small, or an argument is out of range.
    """
    check_block_bytes(block_bytes)
    if durability not in ("step", "checkpoint"):
        raise StoreError(f"durability must be 'step' or 'checkpoint', got {durability!r}")
    if len(weights) != members:
        raise StoreError(
            f"{len(weights)} weights for {members} members, got {list(weights)}; give one weight per path "
            "(--weights 2,1)"
        )
    scratch_bytes = whole_number(scratch_bytes, "scratch_bytes")
    if capacity is None and not layouts and scratch_bytes == 0:
        raise StoreError(
            "a new store needs a capacity, or the specs of the tensors it is for; only on block devices is it as "
            "large as they are without either"
        )
    needed = data_bytes_needed(layouts, durability) + round_up(scratch_bytes, block_bytes)
    room = needed if capacity is None else _parsed(capacity)
    if capacity is not None and room < needed:
        raise StoreError(
            f"a capacity of {room:,} bytes is too small: the tensors take {needed - scratch_bytes:,} bytes in "
            f"durability '{durability}', scratch {scratch_bytes:,}; give at least {needed:,}"
        )
    geometry = plan_geometry(
        capacity_bytes=room,
        scratch_bytes=scratch_bytes,
        catalog_bytes=_catalog_room(layouts, room, capacity is None)
        if catalog_bytes is None
        else catalog_bytes,
        block_bytes=block_bytes,
        weights=weights,
    )
    CatalogSize.of(layouts).check_fits(geometry.catalog_bytes, 0, "cannot create a store for these specs")
    return geometry


def plan_whole_devices(
    device_bytes: Sequence[int], *, block_bytes: int, weights: Sequence[int], catalog_bytes: int | None
) -> Geometry:
    """Returns the geometry of the largest store with these ``weights`` that fits devices of ``device_bytes``.

    Raises:
        StoreError: a device is too small to hold anything.
    """
    check_block_bytes(block_bytes)
    check_weights(weights)
    # The catalog's room is planned for all of the space, of which the rest is a little less.
    limit = min(size // weight for size, weight in zip(device_bytes, weights, strict=True)) * sum(weights)
    catalog = _catalog_room((), limit, False) if catalog_bytes is None else catalog_bytes
    begin = plan_geometry(
        capacity_bytes=0, scratch_bytes=0, catalog_bytes=catalog, block_bytes=block_bytes, weights=weights
    ).data_offset
    unit = block_bytes if len(weights) == 1 else STRIPE_BYTES
    shares = (
        max(size - begin, 0) // unit // weight for size, weight in zip(device_bytes, weights, strict=True)
    )
    capacity = min(shares) * unit * sum(weights)
    if capacity == 0:
        smallest = min(device_bytes)
        raise StoreError(
            f"a device of {smallest:,} bytes has no room for a store: its own data takes {begin:,}; give a larger "
            "device, or less catalog_bytes"
        )
    return plan_geometry(
        capacity_bytes=capacity,
        scratch_bytes=0,
        catalog_bytes=catalog,
        block_bytes=block_bytes,
        weights=weights,
    )


def _catalog_room(layouts: Sequence[TensorLayout], capacity: int, exact: bool) -> int:
    """Twice what the known tensors take; for those to come, as if a capacity were full of the smallest ones."""
    names = sum(len(layout.spec.name.encode()) + _TENSOR_RECORD_BYTES for layout in layouts)
    known = HEADER_BYTES + names + sum(9 * layout.tiles + 4 * layout.units for layout in layouts)
    guessed = 0 if exact else min(capacity // _CAPACITY_PER_CATALOG_BYTE, _MAX_GUESSED_CATALOG_BYTES)
    return 2 * known + guessed + _SPARE_CATALOG_BYTES


def _parsed(capacity: int | str) -> int:
    if not isinstance(capacity, str):
        return whole_number(capacity, "capacity", least=1)
    try:
        return whole_number(parse_bytes(capacity), "capacity", least=1)
    except ValueError as error:
        raise StoreError(f"capacity: {error}") from None
