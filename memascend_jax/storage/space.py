# SPDX-License-Identifier: Apache-2.0
"""Who has which part of the store's address space: tensors, their second places, scratch, and what is free."""

from __future__ import annotations

from collections.abc import Sequence

from memascend_jax.errors import StoreError
from memascend_jax.storage.capacity import data_bytes_needed
from memascend_jax.storage.extents import ExtentAllocator
from memascend_jax.storage.spec import TensorLayout
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.tile_table import NO_PLACE, StoredTensor
from memascend_jax.storage.volume import Volume
from memascend_jax.units import format_bytes


class Space:
    """Tensors lie in ``[0, capacity - scratch)`` in the order they were declared, scratch behind them.

    Extents of removed tensors stay taken until ``committed``: the last generation may still refer to them.
    """

    def __init__(self, volume: Volume) -> None:
        geometry = volume.geometry
        self._path = volume.path
        self._durability: Durability = volume.superblock.durability
        self._capacity_bytes = geometry.capacity_bytes
        self._data_end = geometry.capacity_bytes - geometry.scratch_bytes
        self._data = ExtentAllocator(0, self._data_end, geometry.block_bytes)
        self._scratch = ExtentAllocator(self._data_end, geometry.capacity_bytes, geometry.block_bytes)
        self._freed: list[tuple[int, int]] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors' part that are taken, those that the next commit frees included."""
        return self._data_end - self._data.free_bytes

    def place(self, layouts: Sequence[TensorLayout]) -> list[StoredTensor]:
        """Returns the tensors with their places: first the first places of all, then the second ones, so that each
        run of tensors lies in one piece.

        Raises:
            StoreError: there is no room for all of them; none has taken any then.
        """
        taken: list[tuple[int, int]] = []
        try:
            first = [self._allocate(layout, taken) for layout in layouts]
            second = [
                self._allocate(layout, taken) if self._has_two_places(layout) else NO_PLACE
                for layout in layouts
            ]
        except StoreError:
            for address, nbytes in taken:
                self._data.release(address, nbytes)
            raise
        return [
            StoredTensor(layout, bases)
            for layout, bases in zip(layouts, zip(first, second, strict=True), strict=True)
        ]

    def reserve(self, tensors: Sequence[StoredTensor]) -> None:
        """Takes the places of ``tensors`` as recorded on disk."""
        for tensor in tensors:
            for address, nbytes in tensor.extents():
                self._data.reserve(address, nbytes)

    def free_at_commit(self, tensor: StoredTensor) -> None:
        """Gives the places of ``tensor`` back at the next commit."""
        self._freed += tensor.extents()

    def committed(self) -> None:
        """Says that no generation on disk refers to what was freed."""
        for address, nbytes in self._freed:
            self._data.release(address, nbytes)
        self._freed = []

    def allocate_scratch(self, name: str, nbytes: int) -> int:
        """Returns the address of ``nbytes`` for scratch, from its own part first.

        Raises:
            StoreError: there is no extent so large.
        """
        address = self._scratch.allocate(nbytes)
        if address is None:
            address = self._data.allocate(nbytes)
        if address is None:
            largest = max(self._scratch.largest_free_bytes, self._data.largest_free_bytes)
            raise StoreError(
                f"no room for scratch '{name}' of {nbytes:,} bytes in store '{self._path}': the largest free extent "
                f"is {largest:,} bytes; create the store with more scratch_bytes"
            )
        return address

    def release_scratch(self, address: int, nbytes: int) -> None:
        """Gives an extent of ``allocate_scratch`` back."""
        (self._data if address < self._data_end else self._scratch).release(address, nbytes)

    def _has_two_places(self, layout: TensorLayout) -> bool:
        return self._durability == "step" and layout.spec.mutable

    def _allocate(self, layout: TensorLayout, taken: list[tuple[int, int]]) -> int:
        address = self._data.allocate(layout.place_bytes)
        if address is None:
            waiting = sum(nbytes for _, nbytes in self._freed)
            needed = data_bytes_needed([layout], self._durability)
            raise StoreError(
                f"no room for tensor '{layout.spec.name}' in store '{self._path}': it takes {needed:,} bytes "
                f"({format_bytes(needed)}) in durability '{self._durability}', the store has "
                f"{self._data.free_bytes:,} free of {self._capacity_bytes:,} (largest extent "
                f"{self._data.largest_free_bytes:,}; the next commit frees {waiting:,}); create a larger store"
            )
        taken.append((address, layout.place_bytes))
        return address
