# SPDX-License-Identifier: Apache-2.0
"""The pure arithmetic of the store: mapping to members, tiles, free space, sizes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from memascend_jax.errors import StoreError
from memascend_jax.storage.extents import ExtentAllocator
from memascend_jax.storage.layout import (
    CATALOG_OFFSET,
    MAX_BLOCK_BYTES,
    SESSION_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Striping,
    deal_evenly,
    merge_adjacent,
    plan_geometry,
)
from memascend_jax.storage.spec import TensorLayout, TensorSpec

MIB = 1 << 20


def geometry(weights: tuple[int, ...], capacity: int = 40 * MIB) -> Geometry:
    return plan_geometry(
        capacity_bytes=capacity, scratch_bytes=0, catalog_bytes=1 << 16, block_bytes=4096, weights=weights
    )


def one_by_one(plan: Geometry, address: int) -> tuple[int, int]:
    """The mapping as docs/store_format.md says it, one byte at a time."""
    if len(plan.weights) == 1:
        return 0, plan.data_offset + address
    pattern = deal_evenly(plan.weights)
    stripe, within = divmod(address, plan.stripe_bytes)
    turn, position = divmod(stripe, len(pattern))
    member = pattern[position]
    index = turn * plan.weights[member] + pattern[:position].count(member)
    return member, plan.data_offset + index * plan.stripe_bytes + within


@pytest.mark.parametrize("weights", [(1,), (1, 1), (1, 2), (3, 1, 2), (5, 7), (1,) * 16])
def test_mapping_agrees_with_the_documented_one_and_no_two_bytes_share_a_place(
    weights: tuple[int, ...],
) -> None:
    plan = geometry(weights)
    striping = Striping(plan)
    rng = np.random.default_rng(1)
    addresses = np.unique(rng.integers(0, plan.capacity_bytes, 3000))
    places = {striping.locate(int(address)) for address in addresses}
    assert places == {one_by_one(plan, int(address)) for address in addresses}
    assert len(places) == len(addresses)
    for member, offset in places:
        assert plan.data_offset <= offset < plan.member_bytes(member)


@pytest.mark.parametrize("weights", [(1,), (1, 1), (3, 1, 2)])
def test_segments_cover_each_byte_of_the_extents_once(weights: tuple[int, ...]) -> None:
    plan = geometry(weights, 24 * MIB)
    striping = Striping(plan)
    rng = np.random.default_rng(2)
    for _ in range(50):
        count = int(rng.integers(1, 8))
        begins = rng.integers(0, 20 * MIB // 4096, count) * 4096
        lengths = rng.integers(1, 900, count) * 4096
        memory = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        extents = np.stack([begins, memory, lengths], axis=1).astype(np.int64)
        segments = striping.segments(extents)
        assert segments[:, 3].sum() == lengths.sum()
        found = {}
        for member, offset, address, nbytes in segments.tolist():
            for step in range(0, nbytes, 4096):
                found[address + step] = (member, offset + step)
        expected = {}
        for begin, address, nbytes in extents.tolist():
            for step in range(0, nbytes, 4096):
                expected[address + step] = one_by_one(plan, begin + step)
        assert found == expected


def test_neighbours_on_disk_and_in_memory_become_one_segment() -> None:
    rows = [(0, 100, 10), (10, 110, 5), (15, 115, 1), (16, 200, 4), (30, 204, 4), (34, 208, 2)]
    merged = merge_adjacent(np.array(rows, np.int64))
    assert merged.tolist() == [[0, 100, 16], [16, 200, 4], [30, 204, 6]]
    assert merge_adjacent(np.empty((0, 3), np.int64)).shape == (0, 3)


@pytest.mark.parametrize("weights", [(1,), (1, 1), (2, 1), (5, 3), (64, 1), (1, 2, 3, 4)])
def test_a_round_deals_each_member_its_weight_and_spreads_it(weights: tuple[int, ...]) -> None:
    pattern = deal_evenly(weights)
    assert [pattern.count(member) for member in range(len(weights))] == list(weights)
    for member, weight in enumerate(weights):
        for stop in range(len(pattern) + 1):
            share = stop * weight / len(pattern)
            assert abs(pattern[:stop].count(member) - share) <= len(weights)


def test_fixed_areas_do_not_overlap_for_the_largest_block() -> None:
    begins = [*SUPERBLOCK_OFFSETS, SESSION_OFFSET, CATALOG_OFFSET]
    ordered = sorted(begins)
    assert all(after - before >= MAX_BLOCK_BYTES for before, after in pairwise(ordered))
    plan = geometry((1, 1))
    assert plan.catalog_slot(0) == CATALOG_OFFSET
    assert plan.catalog_slot(1) + plan.catalog_bytes <= plan.data_offset


def test_members_share_the_capacity_by_weight() -> None:
    plan = geometry((3, 1), 4 * MIB + 1)
    assert plan.capacity_bytes == 8 * MIB
    assert plan.member_bytes(0) - plan.data_offset == 6 * MIB
    assert plan.member_bytes(1) - plan.data_offset == 2 * MIB


def test_allocator_is_first_fit_and_joins_neighbours() -> None:
    space = ExtentAllocator(0, 100, 1)
    a, b, c = (space.allocate(n) for n in (10, 20, 30))
    assert (a, b, c) == (0, 10, 30)
    space.release(10, 20)
    assert space.allocate(25) == 60
    assert space.allocate(20) == 10
    for address, nbytes in ((60, 25), (0, 10), (30, 30), (10, 20)):
        space.release(address, nbytes)
    assert (space.free_bytes, space.largest_free_bytes) == (100, 100)
    assert space.allocate(101) is None


def test_allocator_refuses_recorded_extents_that_cannot_be() -> None:
    space = ExtentAllocator(0, 4096 * 10, 4096)
    space.reserve(8192, 4096)
    for address, nbytes in [
        (8192, 4096),
        (4096, 8192),
        (100, 4096),
        (4096 * 9, 8192),
        (1 << 62, 4096),
        (0, 5),
    ]:
        with pytest.raises(StoreError, match="misaligned, outside the store or overlaps"):
            space.reserve(address, nbytes)
    space.reserve(0, 8192)
    assert space.free_bytes == 4096 * 7


@pytest.mark.parametrize(
    ("elements", "tile", "spans"),
    [
        (0, 1024, [(0, 0)]),
        (1, None, [(0, 1)]),
        (1024, 1024, [(0, 1024)]),
        (1025, 1024, [(0, 1024), (1024, 1)]),
        (5000, 2048, [(0, 2048), (2048, 2048), (4096, 904)]),
    ],
)
def test_tiles_cut_a_tensor_without_gap(
    elements: int, tile: int | None, spans: list[tuple[int, int]]
) -> None:
    layout = TensorLayout(TensorSpec("w", "float32", (elements,), tile_elements=tile), 4096)
    assert [layout.tile_span(index) for index in range(layout.tiles)] == spans
    assert layout.place_bytes == -(-elements * 4 // 4096) * 4096


@pytest.mark.parametrize(
    ("shape", "tile", "unit", "units"),
    [
        ((100, 576), None, 4096, 29),  # 1,152-byte rows share blocks: one checksum per block
        ((64, 4096), None, 8192, 64),  # rows of whole blocks: one per row
        ((64, 4096), 3 * 2048, 4096, 128),  # rows that tiles cut: per block again
        ((10, 8), None, 4096, 1),
    ],
)
def test_row_tensors_have_a_checksum_per_group_of_blocks(
    shape: tuple[int, int], tile: int | None, unit: int, units: int
) -> None:
    layout = TensorLayout(TensorSpec("w", "bfloat16", shape, tile_elements=tile, row_access=True), 4096)
    assert (layout.unit_bytes, layout.units) == (unit, units)
