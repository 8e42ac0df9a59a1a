# SPDX-License-Identifier: Apache-2.0
"""The state of every tile in flat arrays, so that a commit copies arrays and never walks tiles.

Each ``StoredTensor`` sees its own part through views; the arrays grow by doubling and are compacted when a
removed tensor has left a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.storage.spec import TensorLayout

#: The place of a tile that was never written.
UNWRITTEN = 255
NO_PLACE = -1

_COLUMNS: dict[str, Any] = {
    "place": np.uint8,
    "committed": np.uint8,
    "last_write": np.int64,
    "last_read": np.int64,
}


class StoredTensor:
    """A tensor's layout, where its places begin, and views of its tiles' state.

    ``place[t]`` is where the newest write of tile ``t`` went (0, 1 or ``UNWRITTEN``), ``committed[t]`` where the
    last generation has it. ``last_write`` and ``last_read`` are serial numbers of the batches that touched the
    tile last. ``poisoned`` holds tiles whose last write failed.
    """

    __slots__ = (
        "bases",
        "checksums",
        "committed",
        "last_read",
        "last_write",
        "layout",
        "place",
        "poisoned",
        "spans",
    )

    place: npt.NDArray[np.uint8]
    committed: npt.NDArray[np.uint8]
    last_write: npt.NDArray[np.int64]
    last_read: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]

    def __init__(self, layout: TensorLayout, bases: tuple[int, int]) -> None:
        self.layout = layout
        self.bases = bases
        self.poisoned: set[int] = set()
        #: Checked (start, count) requests and what they mean; filled by the batch.
        self.spans: dict[tuple[int, int | None], Any] = {}

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.layout.spec.name

    @property
    def places(self) -> int:
        """How many places each tile has: 1 or 2."""
        return 1 if self.bases[1] == NO_PLACE else 2

    def extents(self) -> Iterable[tuple[int, int]]:
        """Yields the (address, bytes) that the tensor occupies."""
        return ((base, self.layout.place_bytes) for base in self.bases if base != NO_PLACE)

    def tile_units(self, tile: int) -> slice:
        """Returns the slice of ``checksums`` that belongs to ``tile``."""
        first = tile * self.layout.units_per_tile
        return slice(first, min(first + self.layout.units_per_tile, self.layout.units))

    def write_place(self, tile: int) -> int:
        """Returns the place that the next write of ``tile`` goes to.

        Never the committed one where there are two: that is what makes a generation atomic.
        """
        return 1 if self.bases[1] != NO_PLACE and self.committed[tile] == 0 else 0


class TileTable:
    """The flat arrays behind all ``StoredTensor`` views, in the catalog's order of tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.tiles = 0
        self.units = 0
        self._holes = False
        self._columns = {name: np.empty(0, dtype) for name, dtype in _COLUMNS.items()}
        self._checksums = np.empty(0, np.uint32)

    @property
    def place(self) -> npt.NDArray[np.uint8]:
        """The newest place of every tile, in catalog order once ``compact`` has run."""
        return self._columns["place"][: self.tiles]

    @property
    def committed(self) -> npt.NDArray[np.uint8]:
        """The committed place of every tile."""
        return self._columns["committed"][: self.tiles]

    @property
    def checksums(self) -> npt.NDArray[np.uint32]:
        """The checksum of every unit of the newest contents."""
        return self._checksums[: self.units]

    def add(self, tensor: StoredTensor) -> None:
        """Appends ``tensor`` with every tile unwritten."""
        tiles, units = self.tiles + tensor.layout.tiles, self.units + tensor.layout.units
        if tiles > len(self._columns["place"]) or units > len(self._checksums):
            self._move_to(list(self.tensors.values()), max(2 * tiles, 64), max(2 * units, 64))
        self.tensors[tensor.name] = tensor
        self._bind(tensor, self.tiles, self.units)
        self.tiles, self.units = tiles, units
        tensor.place[:] = UNWRITTEN
        tensor.committed[:] = UNWRITTEN
        tensor.last_write[:] = 0
        tensor.last_read[:] = 0
        tensor.checksums[:] = 0

    def remove(self, name: str) -> StoredTensor:
        """Takes the tensor out and returns it; its views stay valid until the next ``compact``."""
        self._holes = True
        return self.tensors.pop(name)

    def compact(self) -> None:
        """Closes the holes that removed tensors left."""
        if self._holes:
            kept = list(self.tensors.values())
            tiles = sum(tensor.layout.tiles for tensor in kept)
            units = sum(tensor.layout.units for tensor in kept)
            self._move_to(kept, max(tiles, 64), max(units, 64))
            self._holes = False

    def load(self, place: npt.NDArray[np.uint8], checksums: npt.NDArray[np.uint32]) -> None:
        """Sets the state of all tiles to that of a committed generation, given in catalog order."""
        self.place[:] = place
        self.committed[:] = place
        self.checksums[:] = checksums

    def _move_to(self, kept: Sequence[StoredTensor], tile_room: int, unit_room: int) -> None:
        old = {tensor.name: tensor for tensor in kept}
        self._columns = {name: np.empty(tile_room, dtype) for name, dtype in _COLUMNS.items()}
        self._checksums = np.empty(unit_room, np.uint32)
        self.tiles = self.units = 0
        for tensor in old.values():
            state = {column: getattr(tensor, column) for column in (*_COLUMNS, "checksums")}
            self._bind(tensor, self.tiles, self.units)
            for column, values in state.items():
                getattr(tensor, column)[:] = values
            self.tiles += tensor.layout.tiles
            self.units += tensor.layout.units

    def _bind(self, tensor: StoredTensor, first_tile: int, first_unit: int) -> None:
        for column, values in self._columns.items():
            setattr(tensor, column, values[first_tile : first_tile + tensor.layout.tiles])
        tensor.checksums = self._checksums[first_unit : first_unit + tensor.layout.units]
