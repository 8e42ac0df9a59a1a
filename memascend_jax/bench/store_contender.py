# SPDX-License-Identifier: Apache-2.0
"""The store under measurement: tensors between its members and slots of a pinned arena, without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from memascend_jax.bench.contest import ROW_BYTES, ROWS
from memascend_jax.bench.tensor_set import TILE_BYTES, TensorSet
from memascend_jax.errors import StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.storage.bounce import DEFAULT_BOUNCE_BYTES
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.tensor_store import Scratch, TensorSpec, TensorStore, Ticket
from memascend_jax.units import MIB, round_up

#: In the mixed case this much is read, then written, with several such batches in flight: as in a training step.
_MIXED_BATCH_BYTES = 8 * MIB
_MIXED_BATCHES_IN_FLIGHT = 8
ROW_TABLE = "table of rows"


class StoreContender:
    """A store made for the measurement and removed by ``close``; every read is compared with what was written."""

    name = "memascend store"

    def __init__(
        self, paths: Sequence[str], sets: Sequence[TensorSet], table_bytes: int, io: IoArguments
    ) -> None:
        self._places = {tensors.label: _places(tensors) for tensors in sets}
        ends = [at + round_up(nbytes, 4096) for places in self._places.values() for _, at, nbytes in places]
        room = max(ROWS * ROW_BYTES, *ends)
        self._arena = PinnedArena(2 * round_up(room, 2 * MIB) + DEFAULT_BOUNCE_BYTES)
        self._source = self._arena.allocate(room, "source")
        self._target = self._arena.allocate(room, "target")
        self._source.view(0, room)[:] = np.frombuffer(np.random.default_rng(1).bytes(room), np.uint8)
        self._paths = list(paths)
        specs = [spec for tensors in sets for spec in self._named(tensors)]
        if table_bytes:
            rows = (table_bytes // ROW_BYTES, ROW_BYTES)
            specs.append(TensorSpec(ROW_TABLE, "uint8", rows, tile_elements=TILE_BYTES, row_access=True))
        arguments: IoArguments = {**io, "arena": self._arena}
        # Whole stripes on every member.
        scratch_bytes = round_up(room, len(self._paths) * TILE_BYTES)
        self.store = TensorStore.create(self._paths, specs=specs, scratch_bytes=scratch_bytes, **arguments)
        self._scratch = self.store.scratch("roof", scratch_bytes)
        self._rng = np.random.default_rng(2)
        self._rows_out = self._target.view(0, ROWS * ROW_BYTES).reshape(ROWS, ROW_BYTES)

    @property
    def scratch(self) -> Scratch:
        """The extent outside all generations, as large as the largest set."""
        return self._scratch

    @property
    def source(self) -> tuple[int, int]:
        """(address, bytes) of the memory that is written."""
        return self._source.address, self._source.nbytes

    def fill(self) -> None:
        """Writes every tensor to both its places, so that no measured write is the first to its blocks.

        The scratch extent too, in full, for a roof to be measured on.
        """
        for begin in range(0, self._scratch.nbytes, self._source.nbytes):
            batch = self.store.batch()
            nbytes = min(self._source.nbytes, self._scratch.nbytes - begin)
            self._scratch.write(self._source.address, nbytes, begin, batch)
            batch.submit().wait()
        for label in self._places:
            for _ in range(2):
                self.write(label)
                self.store.commit()
        if ROW_TABLE in self.store:
            piece = np.asarray(self._source.view(0, min(self._source.nbytes, 64 * MIB)))
            elements = int(np.prod(self.store.spec(ROW_TABLE).shape))
            for start in range(0, elements, len(piece)):
                self.store.write_elements(ROW_TABLE, start, piece[: elements - start])
            self.store.commit()

    def write(self, label: str) -> None:
        """Writes all tensors of a set; done when the disk has said so."""
        batch = self.store.batch()
        for name, at, nbytes in self._places[label]:
            for tile, begin in enumerate(range(0, nbytes, TILE_BYTES)):
                batch.write_tile(name, tile, self._source.address + at + begin)
        batch.submit().wait()

    def write_scratch(self, label: str) -> None:
        """Writes as much to the scratch extent, in the same pieces: there are no checksums there."""
        batch = self.store.batch()
        for _, at, nbytes in self._places[label]:
            for begin in range(0, nbytes, TILE_BYTES):
                piece = min(TILE_BYTES, nbytes - begin)
                self._scratch.write(self._source.address + at + begin, piece, at + begin, batch)
        batch.submit().wait()

    def write_durably(self, label: str) -> None:
        """Writes all tensors of a set and commits them."""
        self.write(label)
        self.store.commit()

    def read(self, label: str) -> None:
        """Reads all tensors of a set."""
        batch = self.store.batch()
        for name, at, _ in self._places[label]:
            batch.read(name, self._target.address + at)
        batch.submit().wait()

    def mixed(self, label: str) -> None:
        """Reads all tensors of a set and writes as much, in turns with several batches in flight."""
        in_flight: deque[Ticket] = deque()
        reads, writes = self.store.batch(), self.store.batch()
        gathered = 0
        for name, at, nbytes in self._places[label]:
            for tile, start in enumerate(range(0, nbytes, TILE_BYTES)):
                count = min(TILE_BYTES, nbytes - start)
                reads.read(name, self._target.address + at + start, start, count)
                writes.write_tile(name, tile, self._source.address + at + start)
                gathered += count
                if gathered >= _MIXED_BATCH_BYTES:
                    in_flight += [reads.submit(), writes.submit()]
                    gathered = 0
                    while len(in_flight) > 2 * _MIXED_BATCHES_IN_FLIGHT:
                        in_flight.popleft().wait()
        in_flight += [reads.submit(), writes.submit()]
        for ticket in in_flight:
            ticket.wait()

    def read_rows(self) -> None:
        """Reads random rows."""
        rows = self.store.spec(ROW_TABLE).shape[0]
        self.store.read_rows(ROW_TABLE, self._rng.integers(0, rows, ROWS), self._rows_out)

    def check(self, label: str) -> None:
        """Raises ``StoreError`` unless the last read of a set gave what was written."""
        for name, at, nbytes in self._places[label]:
            same = np.array_equal(self._source.view(at, nbytes), self._target.view(at, nbytes))
            if not same:
                raise StoreError(f"tensor '{name}' was not read as it was written; the measurement is void")

    def close(self) -> None:
        """Removes the store and gives the memory back."""
        self.store.close()
        TensorStore.wipe(self._paths)
        for slot in (self._source, self._target):
            slot.release()
        self._arena.close()

    @staticmethod
    def _named(tensors: TensorSet) -> list[TensorSpec]:
        return [
            TensorSpec(f"{tensors.label}/{spec.name}", spec.dtype, spec.shape, spec.tile_elements)
            for spec in tensors.specs()
        ]


def _places(tensors: TensorSet) -> list[tuple[str, int, int]]:
    """Returns (name in the store, offset in the memory, bytes) of each tensor."""
    found = []
    at = 0
    for name, nbytes in tensors.sizes.items():
        found.append((f"{tensors.label}/{name}", at, nbytes))
        at += round_up(nbytes, 4096)
    return found
