# SPDX-License-Identifier: Apache-2.0
"""Commits: makes everything written so far one new generation, or leaves the last one as it was.

Order on disk: data, flush, the other catalog slot on every member, flush. In ``durability: checkpoint`` tiles
are overwritten in place, so before the first such write a copy of the committed catalog marked *dirty* is
written as the next generation: a crash is then recognised, not repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage.catalog import (
    Catalog,
    CatalogSize,
    decode_catalog,
    encode_catalog,
    encode_tensors,
    peek_total_bytes,
    restamp,
)
from memascend_jax.storage.checksum import crc32c_array
from memascend_jax.storage.engine import aligned_buffer
from memascend_jax.storage.recovery import Slot
from memascend_jax.storage.spec import TensorLayout
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.storage.tile_io import TileIo
from memascend_jax.storage.tile_table import StoredTensor, TileTable
from memascend_jax.storage.volume import Volume
from memascend_jax.units import round_up


class Committer:
    """Writes generations. ``generation`` is the last one on disk, ``run_state`` what came with it."""

    def __init__(self, volume: Volume, table: TileTable, io: TileIo) -> None:
        self._volume = volume
        self._table = table
        self._io = io
        self._tensors: bytes | None = None
        self._size = CatalogSize()
        #: The catalog last written or read, in whole blocks.
        self._raw = aligned_buffer(0)
        self.generation = 0
        self.run_state = b""
        self.dirty = False
        self._written_before = 0

    def check_room(self, added: Sequence[TensorLayout], removed: Sequence[TensorLayout] = ()) -> None:
        """Raises ``StoreError`` when no catalog can hold the tensors, these too, and a run state as long as now."""
        names = f"'{added[0].spec.name}'" + (f" and {len(added) - 1:,} more" if len(added) > 1 else "")
        self._size_with(added, removed).check_fits(
            self._volume.geometry.catalog_bytes,
            len(self.run_state),
            f"no room to declare tensor {names} in store '{self._volume.path}'",
        )

    def tensors_changed(
        self, added: Sequence[TensorLayout] = (), removed: Sequence[TensorLayout] = ()
    ) -> None:
        """Says that these tensors were declared and removed since the last commit."""
        self._size = self._size_with(added, removed)
        self._tensors = None

    def commit(self, run_state: bytes) -> int:
        """Makes the newest contents of all tensors and ``run_state`` the next generation; returns its number.

        Raises:
            StoreError: a tile's last write failed, the catalog has no room, or the disk failed; after a failure
                of the disk this session writes no more, and opening the store again gives the last generation.
        """
        with self._io.write_lock:
            self._io.check_writable()
            self._io.settle_all()
            self._check_not_poisoned()
            with self._io.lock:
                self._table.compact()
                raw = self._encode(self.generation + 1, run_state)
            self._write(self.generation + 1, raw)
            with self._io.lock:
                self._table.committed[:] = self._table.place
            self._raw, self.run_state, self.dirty = raw, run_state, False
            return self.generation

    def rollback(self, tensors: Sequence[StoredTensor]) -> None:
        """Makes the last generation's contents of ``tensors`` the newest ones again.

        Raises:
            StoreError: a tensor was declared after the last commit, or its committed tiles were overwritten in place.
        """
        with self._io.write_lock:
            self._io.check_writable()
            self._io.settle_all()
            catalog = self._decoded()
            committed = {(tensor.name, tensor.bases): index for index, tensor in enumerate(catalog.tensors)}
            for tensor in tensors:
                if (tensor.name, tensor.bases) not in committed:
                    raise StoreError(f"cannot roll tensor '{tensor.name}' back: no generation has it yet")
                if self.dirty and tensor.places == 1:
                    raise StoreError(
                        f"cannot roll tensor '{tensor.name}' back: store '{self._volume.path}' overwrites in place "
                        "(durability 'checkpoint'); create it with durability='step'"
                    )
            tiles = np.cumsum([0, *(tensor.layout.tiles for tensor in catalog.tensors)])
            units = np.cumsum([0, *(tensor.layout.units for tensor in catalog.tensors)])
            with self._io.lock:
                for tensor in tensors:
                    index = committed[tensor.name, tensor.bases]
                    tensor.place[:] = catalog.place[tiles[index] : tiles[index + 1]]
                    tensor.checksums[:] = catalog.checksums[units[index] : units[index + 1]]
                    tensor.poisoned.clear()

    def write_first(self) -> None:
        """Writes generation 0 of a new store: its tensors, none of them written."""
        self._raw = self._encode(0, b"")
        self._write(0, self._raw)

    def mark_dirty(self) -> None:
        """Puts on disk that committed tiles are about to be overwritten. Does nothing the second time."""
        if self.dirty:
            return
        raw = aligned_buffer(self._raw.nbytes)
        raw[:] = self._raw
        restamp(raw, self.generation + 1, True, crc32c_array)
        self._write(self.generation + 1, raw)
        self._raw, self.dirty = raw, True

    def loaded(self, catalog: Catalog) -> None:
        """Takes over the generation that the table was loaded from."""
        self.generation, self.run_state, self.dirty = catalog.generation, catalog.run_state, catalog.dirty
        self._io.found_dirty = catalog.dirty
        self._written_before = catalog.bytes_written
        self._size = CatalogSize.of(tensor.layout for tensor in catalog.tensors)
        self._raw = self._encode(catalog.generation, catalog.run_state)

    def read_slots(self) -> list[Slot]:
        """Returns what the catalog slots of all members hold."""
        members = range(len(self._volume.members))
        return [self._read_slot(member, slot) for member in members for slot in (0, 1)]

    def rewrite(self, places: Sequence[tuple[int, int]]) -> None:
        """Writes the generation in memory again to these (member, slot) places, durably."""
        geometry = self._volume.geometry
        pieces = [(member, geometry.catalog_slot(slot), self._raw) for member, slot in places]
        self._volume.write_metadata(pieces)
        self._volume.flush()

    @property
    def bytes_written(self) -> int:
        """Bytes written over the store's life, as far as commits have recorded them, and in this session."""
        return self._written_before + self._written_now()

    def _written_now(self) -> int:
        return int(self._volume.engine.counters()["write_bytes"])

    def _write(self, generation: int, raw: npt.NDArray[np.uint8]) -> None:
        offset = self._volume.geometry.catalog_slot(generation % 2)
        try:
            self._volume.flush()
            self._volume.write_metadata(
                [(member, offset, raw) for member in range(len(self._volume.members))]
            )
            self._volume.flush()
        except OSError as error:
            # What a failed flush lost cannot be known: only what is read from the disk can be trusted again.
            self._io.write_refusal = (
                f"store '{self._volume.path}' failed while committing generation {generation:,} ({error}); close "
                "it and open it again to go on from the last generation on disk"
            )
            raise
        self.generation = generation

    def _size_with(self, added: Sequence[TensorLayout], removed: Sequence[TensorLayout]) -> CatalogSize:
        return self._size.plus(CatalogSize.of(added)).plus(CatalogSize.of(removed), -1)

    def _encode(self, generation: int, run_state: bytes) -> npt.NDArray[np.uint8]:
        """Returns the catalog of the table as it is, in whole blocks."""
        table, geometry = self._table, self._volume.geometry
        if self._tensors is None:
            self._tensors = encode_tensors(list(table.tensors.values()))
        self._size.check_fits(
            geometry.catalog_bytes, len(run_state), f"cannot commit to store '{self._volume.path}'"
        )
        raw = aligned_buffer(round_up(self._size.nbytes(len(run_state)), geometry.block_bytes))
        encode_catalog(
            raw,
            store_id=self._volume.superblock.store_id,
            generation=generation,
            dirty=False,
            run_state=run_state,
            bytes_written=self.bytes_written,
            tensors=self._tensors,
            place=table.place,
            checksums=table.checksums,
            crc32c=crc32c_array,
        )
        return raw

    def _decoded(self) -> Catalog:
        """Returns the last generation as it was written or read."""
        volume = self._volume
        catalog = decode_catalog(
            self._raw, volume.superblock.store_id, volume.geometry, volume.path, crc32c_array
        )
        if catalog is None:
            raise StoreError(
                f"the catalog of store '{volume.path}' in memory is damaged; open the store again"
            )
        return catalog

    def _check_not_poisoned(self) -> None:
        bad = [
            f"'{tensor.name}' tile {tile}"
            for tensor in self._table.tensors.values()
            if tensor.poisoned
            for tile in sorted(tensor.poisoned)
        ]
        if bad:
            raise StoreError(
                f"cannot commit to store '{self._volume.path}': the last write of {len(bad):,} tiles failed "
                f"({', '.join(bad[:3])}); write them again first"
            )

    def _read_slot(self, member: int, slot: int) -> Slot:
        volume, block = self._volume, self._volume.geometry.block_bytes
        offset = volume.geometry.catalog_slot(slot)
        try:
            raw = volume.read_metadata(member, offset, block)
            total = peek_total_bytes(raw, volume.geometry.catalog_bytes)
            if total is None:
                return Slot(member, slot, None, blank=not raw.any())
            if total > block:
                raw = volume.read_metadata(member, offset, round_up(total, block))
        except StoreIOError:
            # An unreadable slot is a damaged one: another may hold the generation.
            return Slot(member, slot, None, blank=False)
        path = volume.members[member].path
        catalog = decode_catalog(raw, volume.superblock.store_id, volume.geometry, path, crc32c_array)
        return Slot(member, slot, catalog, blank=False)
