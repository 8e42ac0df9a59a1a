# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie: the fixed areas of a member, and the mapping from the store's address space to members.

Pure arithmetic. A store has one address space of ``capacity_bytes``, striped over its members as RAID-0 with
weights: a round gives member ``m`` ``weights[m]`` stripes, dealt out evenly, so that unequal SSDs finish
together. Member layout, all offsets multiples of the block::

    0        superblock          64 KiB   its copy, session mark behind it
    128 KiB  catalog slot 0      then catalog slot 1      then data, from a multiple of 1 MiB
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage.whole_number import ANY_SIZE, whole_number
from memascend_jax.units import KIB, MIB, round_up

SUPERBLOCK_OFFSETS = (0, 64 * KIB)
#: Behind the superblock's copy, one largest block further.
SESSION_OFFSET = 96 * KIB
CATALOG_OFFSET = 128 * KIB
MAX_BLOCK_BYTES = 32 * KIB
MAX_MEMBERS = 16
MAX_WEIGHT = 64
MAX_CATALOG_BYTES = 1 << 30
STRIPE_BYTES = MIB

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that fix where everything lies; kept in each member's superblock."""

    block_bytes: int
    stripe_bytes: int
    weights: tuple[int, ...]
    capacity_bytes: int
    scratch_bytes: int
    catalog_bytes: int

    @property
    def data_offset(self) -> int:
        """Where data begins on each member."""
        return round_up(CATALOG_OFFSET + 2 * self.catalog_bytes, MIB)

    def catalog_slot(self, slot: int) -> int:
        """Returns the offset of catalog ``slot`` (0 or 1) on each member."""
        return CATALOG_OFFSET + slot * self.catalog_bytes

    def member_bytes(self, member: int) -> int:
        """Returns the bytes that ``member`` needs in all."""
        if len(self.weights) == 1:
            return self.data_offset + self.capacity_bytes
        rounds = self.capacity_bytes // (self.stripe_bytes * sum(self.weights))
        return self.data_offset + rounds * self.weights[member] * self.stripe_bytes

    def total_bytes(self) -> int:
        """Returns the bytes on all members together."""
        return sum(self.member_bytes(member) for member in range(len(self.weights)))


def plan_geometry(
    *, capacity_bytes: int, scratch_bytes: int, catalog_bytes: int, block_bytes: int, weights: Sequence[int]
) -> Geometry:
    """Returns the geometry that holds ``capacity_bytes``, rounded up to whole blocks or stripe rounds."""
    check_block_bytes(block_bytes)
    check_weights(weights)
    capacity_bytes = whole_number(capacity_bytes, "capacity")
    scratch_bytes = whole_number(scratch_bytes, "scratch_bytes")
    catalog_bytes = round_up(whole_number(catalog_bytes, "catalog_bytes", least=1), block_bytes)
    if catalog_bytes > MAX_CATALOG_BYTES:
        raise StoreError(
            f"a catalog of {catalog_bytes:,} bytes is over {MAX_CATALOG_BYTES:,}; use larger tiles"
        )
    if not 0 <= scratch_bytes <= capacity_bytes:
        raise StoreError(
            f"scratch of {scratch_bytes:,} bytes is not within the capacity of {capacity_bytes:,} bytes"
        )
    whole = block_bytes if len(weights) == 1 else STRIPE_BYTES * sum(weights)
    return Geometry(
        block_bytes=block_bytes,
        stripe_bytes=STRIPE_BYTES,
        weights=tuple(int(weight) for weight in weights),
        capacity_bytes=round_up(max(capacity_bytes, block_bytes), whole),
        scratch_bytes=round_up(scratch_bytes, block_bytes),
        catalog_bytes=catalog_bytes,
    )


def check_weights(weights: Sequence[int]) -> None:
    """Raises ``StoreError`` unless there is a weight from 1 to 64 for each of 1 to 16 members."""
    if not 1 <= len(weights) <= MAX_MEMBERS:
        raise StoreError(
            f"a store has 1 to {MAX_MEMBERS} members, got {len(weights)}; give fewer paths, or join disks with RAID"
        )
    for member, weight in enumerate(weights):
        weight = whole_number(weight, f"weights {list(weights)}: that of member {member}", ANY_SIZE)
        if not 1 <= weight <= MAX_WEIGHT:
            raise StoreError(
                f"weights {list(weights)}: members have weights from 1 to {MAX_WEIGHT}, member {member} was given "
                f"{weight}; give each path a share in that range, and leave out a path that is to hold nothing"
            )


def check_block_bytes(block_bytes: int) -> None:
    """Raises ``StoreError`` unless ``block_bytes`` is a power of two from 512 to 32 KiB."""
    block_bytes = whole_number(block_bytes, "block_bytes", least=ANY_SIZE)
    if not 512 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise StoreError(
            f"block_bytes must be a power of two from 512 to {MAX_BLOCK_BYTES:,}, got {block_bytes:,}"
        )


class Striping:
    """Maps extents of the store's address space to segments ``(member, offset, address, nbytes)``."""

    def __init__(self, geometry: Geometry) -> None:
        self._data_offset = geometry.data_offset
        self._single = len(geometry.weights) == 1
        self._stripe = geometry.stripe_bytes
        self._weights = np.asarray(geometry.weights, dtype=np.int64)
        pattern = deal_evenly(geometry.weights)
        self._round_stripes = len(pattern)
        self._member = np.asarray(pattern, dtype=np.int64)
        dealt = [0] * len(geometry.weights)
        self._turn = np.zeros(len(pattern), dtype=np.int64)
        for position, member in enumerate(pattern):
            self._turn[position] = dealt[member]
            dealt[member] += 1

    def segments(self, extents: Int64Array) -> Int64Array:
        """Returns the segments of ``extents``, int64 ``[n, 3]`` of (store address, memory address, nbytes).

        Extents that continue each other both on disk and in memory become one segment; on several members
        they are cut at stripes. The result is int64 ``[m, 4]``: member, offset, memory address, nbytes.
        """
        merged = merge_adjacent(extents)
        if not self._single:
            merged = cut_at_stripes(merged, self._stripe)
        segments = np.empty((len(merged), 4), dtype=np.int64)
        segments[:, 2:] = merged[:, 1:]
        if self._single:
            segments[:, 0] = 0
            segments[:, 1] = merged[:, 0] + self._data_offset
            return segments
        stripe, within = np.divmod(merged[:, 0], self._stripe)
        turn_of_round, position = np.divmod(stripe, self._round_stripes)
        member = self._member[position]
        segments[:, 0] = member
        stripe_on_member = turn_of_round * self._weights[member] + self._turn[position]
        segments[:, 1] = self._data_offset + stripe_on_member * self._stripe + within
        return segments

    def locate(self, store_address: int) -> tuple[int, int]:
        """Returns (member, offset on it) of one byte of the store's address space."""
        member, offset, _, _ = self.segments(np.array([[store_address, 0, 1]], dtype=np.int64))[0].tolist()
        return member, offset


def deal_evenly(weights: Sequence[int]) -> list[int]:
    """Returns the members of one round, each ``weights[m]`` times, as evenly spread as can be."""
    turns = [
        ((2 * turn + 1) / weight, member) for member, weight in enumerate(weights) for turn in range(weight)
    ]
    return [member for _, member in sorted(turns)]


def merge_adjacent(extents: Int64Array) -> Int64Array:
    """Joins each extent to the one before where both the disk and the memory continue."""
    if len(extents) < 2:
        return extents
    ends = extents[:-1] + extents[:-1, 2:]
    continues = (extents[1:, :2] == ends[:, :2]).all(axis=1)
    if not continues.any():
        return extents
    starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
    merged = extents[starts]
    merged[:, 2] = np.add.reduceat(extents[:, 2], starts)
    return merged


def cut_at_stripes(extents: Int64Array, stripe_bytes: int) -> Int64Array:
    """Returns ``extents`` cut wherever they cross a multiple of ``stripe_bytes``."""
    first = extents[:, 0] // stripe_bytes
    counts = np.where(extents[:, 2] > 0, (extents[:, 0] + extents[:, 2] - 1) // stripe_bytes - first + 1, 0)
    source = np.repeat(np.arange(len(extents)), counts)
    piece = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum((first[source] + piece) * stripe_bytes, extents[source, 0])
    end = np.minimum((first[source] + piece + 1) * stripe_bytes, extents[source, 0] + extents[source, 2])
    shift = begin - extents[source, 0]
    return np.stack([begin, extents[source, 1] + shift, end - begin], axis=1)
