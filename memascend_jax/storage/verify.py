# SPDX-License-Identifier: Apache-2.0
"""Reads every tile and compares its checksum: after a crash, and when the user asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memascend_jax.storage.bounce import Bounce
from memascend_jax.storage.checksum import crc32c_array, crc32c_many, unit_pieces
from memascend_jax.storage.engine import EngineTicket, address_of
from memascend_jax.storage.tile_table import UNWRITTEN, StoredTensor
from memascend_jax.storage.volume import Volume
from memascend_jax.units import round_up


@dataclass(frozen=True, slots=True)
class Fault:
    """A piece of a tensor whose data does not match its checksum, and where it begins on disk."""

    tensor: str
    member_path: str
    offset: int
    expected: int
    got: int

    def __str__(self) -> str:
        if self.got < 0:
            return f"tensor '{self.tensor}' at '{self.member_path}' offset {self.offset:,}: cannot be read"
        return (
            f"tensor '{self.tensor}' at '{self.member_path}' offset {self.offset:,}: checksum {self.got:08x}, "
            f"expected {self.expected:08x}"
        )


@dataclass(slots=True)
class VerifyReport:
    """What ``verify`` read and found. ``unwritten``: tiles that hold nothing yet."""

    tensors: int = 0
    tiles: int = 0
    unwritten: int = 0
    bytes: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every checksum matched."""
        return not self.faults


@dataclass(slots=True)
class _Part:
    """A stretch of one tile in bounce memory; ``begin`` is the byte in the tile where it starts."""

    tensor: StoredTensor
    tile: int
    begin: int
    nbytes: int
    store_address: int
    at: int


def verify_tensors(volume: Volume, bounce: Bounce, tensors: Iterable[StoredTensor]) -> VerifyReport:
    """Returns the report on the newest contents of ``tensors``. Memory: the bounce halves, nothing else."""
    report = VerifyReport()
    check = _Check(volume, report)
    with bounce.lock:
        waiting: tuple[list[_Part], EngineTicket, npt.NDArray[np.uint8]] | None = None
        for turn, parts in enumerate(_pieces(tensors, bounce.half_bytes, report)):
            half = bounce.half(turn)
            base = address_of(half)
            extents = [
                (part.store_address, base + part.at, round_up(part.nbytes, part.tensor.layout.block_bytes))
                for part in parts
            ]
            ticket = volume.submit_read(np.array(extents, np.int64), half)
            if waiting is not None:
                check.parts(*waiting)
            waiting = (parts, ticket, half)
        if waiting is not None:
            check.parts(*waiting)
    return report


class _Check:
    """Compares parts in order; a tile larger than a piece runs its checksum on over several."""

    def __init__(self, volume: Volume, report: VerifyReport) -> None:
        self._volume = volume
        self._report = report
        self._running = 0

    def parts(self, parts: list[_Part], ticket: EngineTicket, half: npt.NDArray[np.uint8]) -> None:
        try:
            ticket.wait()
        except OSError:
            self._reread(parts, half)
            return
        self._compare(parts, half)

    def _reread(self, parts: list[_Part], half: npt.NDArray[np.uint8]) -> None:
        """A failed request spoils the whole batch: read its parts one by one to name the bad ones."""
        for part in parts:
            length = round_up(part.nbytes, part.tensor.layout.block_bytes)
            extent = np.array([(part.store_address, address_of(half) + part.at, length)], np.int64)
            try:
                self._volume.submit_read(extent, half).wait()
            except OSError:
                self._fault(part, 0, int(part.tensor.checksums[part.tensor.tile_units(part.tile)][0]), -1)
            else:
                self._compare([part], half)

    def _compare(self, parts: list[_Part], half: npt.NDArray[np.uint8]) -> None:
        small = [part for part in parts if not part.tensor.layout.unit_bytes and self._is_whole(part)]
        base = address_of(half)
        found = crc32c_many(
            np.array([base + part.at for part in small], np.int64),
            np.array([part.nbytes for part in small], np.int64),
        )
        for part, got in zip(small, found.tolist(), strict=True):
            self._expect(part, 0, part.tile, got)
        for part in parts:
            if part.tensor.layout.unit_bytes:
                self._compare_units(part, base)
            elif not self._is_whole(part):
                self._compare_running(part, half)

    def _compare_units(self, part: _Part, base: int) -> None:
        unit = part.tensor.layout.unit_bytes
        found = crc32c_many(*unit_pieces(base + part.at, part.nbytes, unit))
        first = part.tensor.tile_units(part.tile).start + part.begin // unit
        expected = part.tensor.checksums[first : first + len(found)]
        for index in np.flatnonzero(found != expected).tolist():
            self._fault(part, index * unit, int(expected[index]), int(found[index]))

    def _compare_running(self, part: _Part, half: npt.NDArray[np.uint8]) -> None:
        seed = 0 if part.begin == 0 else self._running
        self._running = crc32c_array(half[part.at : part.at + part.nbytes], seed)
        if part.begin + part.nbytes == part.tensor.layout.disk_span(part.tile)[1]:
            self._expect(part, -part.begin, part.tile, self._running)

    def _expect(self, part: _Part, offset: int, unit: int, got: int) -> None:
        expected = int(part.tensor.checksums[unit])
        if got != expected:
            self._fault(part, offset, expected, got)

    def _fault(self, part: _Part, offset: int, expected: int, got: int) -> None:
        path, where = self._volume.locate(part.store_address + offset)
        self._report.faults.append(Fault(part.tensor.name, path, where, expected, got))

    @staticmethod
    def _is_whole(part: _Part) -> bool:
        return part.begin == 0 and part.nbytes == part.tensor.layout.disk_span(part.tile)[1]


def _pieces(tensors: Iterable[StoredTensor], room: int, report: VerifyReport) -> Iterator[list[_Part]]:
    """Yields the written tiles cut and packed into pieces of at most ``room`` bytes."""
    parts: list[_Part] = []
    used = 0
    for tensor in tensors:
        report.tensors += 1
        unit = tensor.layout.unit_bytes or tensor.layout.block_bytes
        largest = room // unit * unit
        for tile, place in enumerate(tensor.place.tolist()):
            if place == UNWRITTEN:
                report.unwritten += 1
                continue
            first, nbytes, _ = tensor.layout.disk_span(tile)
            report.tiles += 1
            report.bytes += nbytes
            begin = 0
            while begin < nbytes:
                if used + unit > room or (used and used + min(nbytes, largest) > room):
                    yield parts
                    parts, used = [], 0
                length = min(nbytes - begin, (room - used) // unit * unit)
                parts.append(_Part(tensor, tile, begin, length, tensor.bases[place] + first + begin, used))
                used += round_up(length, tensor.layout.block_bytes)
                begin += length
    if parts:
        yield parts
