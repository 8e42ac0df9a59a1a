# SPDX-License-Identifier: Apache-2.0
"""The catalog: one generation's tensors, the place and checksum of every tile, and the run state. Pure.

The bytes are written whole to one of two slots and carry one checksum, so that a torn write is never taken for
a generation. Sizes and offsets read from disk are checked before they are used; a catalog whose checksum is
right but whose fields contradict each other is refused. See docs/store_format.md for the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage.extents import ExtentAllocator
from memascend_jax.storage.layout import Geometry
from memascend_jax.storage.spec import TensorLayout, TensorSpec
from memascend_jax.storage.tile_table import NO_PLACE, UNWRITTEN, StoredTensor
from memascend_jax.units import round_up

MAGIC = b"MEMACATL"
CATALOG_VERSION = 1
HEADER_BYTES = 128
#: Codes on disk; append only.
DTYPE_CODES = (
    "bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16",
    "uint16", "int32", "uint32", "int64", "uint64", "bool",
)  # fmt: skip

_HEADER = struct.Struct("<8sII16sQQQQQQQQQQ")
_CRC = struct.Struct("<I")
#: Tensors, dimensions of all of them, bytes of all names.
_TABLE_HEAD = struct.Struct("<QQQ")
_CRC_OFFSET = HEADER_BYTES - _CRC.size
_DIRTY = 1
_MUTABLE, _ROW_ACCESS, _SLICE, _ONE_TILE = 1, 2, 4, 8
_RECORD = np.dtype(
    [
        ("name_start", "<u4"),
        ("name_bytes", "<u4"),
        ("dims_start", "<u4"),
        ("axes", "u1"),
        ("dtype", "u1"),
        ("flags", "<u2"),
        ("tile_elements", "<u8"),
        ("base0", "<i8"),
        ("base1", "<i8"),
    ]
)

#: ``checksum(address_or_buffer, nbytes, seed)`` continuing ``seed``.
Checksum = Callable[[npt.NDArray[np.uint8], int], int]


@dataclass(frozen=True, slots=True)
class Catalog:
    """One decoded generation.

    ``dirty``: tiles were overwritten in place after the commit that it repeats. ``identity`` is its checksum.
    """

    generation: int
    dirty: bool
    identity: int
    run_state: bytes
    bytes_written: int
    tensors: tuple[StoredTensor, ...]
    place: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class CatalogSize:
    """What decides the length of a catalog, as sums that a tensor is added to and taken from."""

    tensors: int = 0
    dims: int = 0
    name_bytes: int = 0
    tiles: int = 0
    units: int = 0

    @classmethod
    def of(cls, layouts: Iterable[TensorLayout]) -> CatalogSize:
        """Returns the sums over ``layouts``."""
        size = cls()
        for layout in layouts:
            spec = layout.spec
            one = cls(
                1,
                len(spec.shape) * (3 if _is_sliced(spec) else 1),
                len(spec.name.encode()),
                layout.tiles,
                layout.units,
            )
            size = size.plus(one)
        return size

    def plus(self, other: CatalogSize, times: int = 1) -> CatalogSize:
        """Returns the sums with ``other`` added ``times``; -1 takes it away."""
        return CatalogSize(
            self.tensors + times * other.tensors,
            self.dims + times * other.dims,
            self.name_bytes + times * other.name_bytes,
            self.tiles + times * other.tiles,
            self.units + times * other.units,
        )

    def nbytes(self, run_state_bytes: int) -> int:
        """Returns the length of the catalog, to the byte what ``encode_catalog`` writes."""
        table = _TABLE_HEAD.size + self.tensors * _RECORD.itemsize + 8 * self.dims + self.name_bytes
        return catalog_bytes(round_up(table, 8), self.tiles, self.units, run_state_bytes)

    def check_fits(self, room: int, run_state_bytes: int, action: str) -> None:
        """Raises ``StoreError``, beginning with ``action``, when the catalog is longer than ``room`` bytes."""
        total = self.nbytes(run_state_bytes)
        if total > room:
            raise StoreError(
                f"{action}: the catalog of {self.tensors:,} tensors with {self.tiles:,} tiles, {self.units:,} "
                f"checksums and {run_state_bytes:,} bytes of run state takes {total:,} bytes, the store has room for "
                f"{room:,}; create it with more catalog_bytes (memascend store create --catalog-bytes), or use "
                "larger tiles"
            )


def encode_tensors(tensors: Sequence[StoredTensor]) -> bytes:
    """Returns the part of a catalog that only changes when a tensor is declared or removed."""
    records = np.zeros(len(tensors), _RECORD)
    dims: list[int] = []
    names = bytearray()
    for index, tensor in enumerate(tensors):
        spec = tensor.layout.spec
        name = spec.name.encode()
        sliced = _is_sliced(spec)
        flags = _MUTABLE * spec.mutable | _ROW_ACCESS * spec.row_access | _SLICE * sliced
        flags |= _ONE_TILE * (spec.tile_elements is None)
        records[index] = (
            len(names),
            len(name),
            len(dims),
            len(spec.shape),
            DTYPE_CODES.index(spec.dtype),
            flags,
            spec.tile_elements or 0,
            *tensor.bases,
        )
        names += name
        dims += spec.shape
        if sliced:
            dims += spec.shape if spec.global_shape is None else spec.global_shape
            dims += (0,) * len(spec.shape) if spec.start is None else spec.start
    head = _TABLE_HEAD.pack(len(tensors), len(dims), len(names))
    body = head + records.tobytes() + np.asarray(dims, "<i8").tobytes() + bytes(names)
    return body.ljust(round_up(len(body), 8), b"\0")


def _is_sliced(spec: TensorSpec) -> bool:
    return spec.global_shape is not None or spec.start is not None


def catalog_bytes(tensors_bytes: int, tiles: int, units: int, run_state_bytes: int) -> int:
    """Returns the length of a catalog with these parts."""
    return HEADER_BYTES + tensors_bytes + round_up(tiles, 8) + round_up(4 * units, 8) + run_state_bytes


def encode_catalog(
    into: npt.NDArray[np.uint8],
    *,
    store_id: bytes,
    generation: int,
    dirty: bool,
    run_state: bytes,
    bytes_written: int,
    tensors: bytes,
    place: npt.NDArray[np.uint8],
    checksums: npt.NDArray[np.uint32],
    crc32c: Checksum,
) -> int:
    """Writes a catalog at the start of ``into`` and returns its length."""
    total = catalog_bytes(len(tensors), len(place), len(checksums), len(run_state))
    header = _HEADER.pack(
        MAGIC,
        CATALOG_VERSION,
        _DIRTY if dirty else 0,
        store_id,
        generation,
        total,
        len(tensors),
        len(place),
        len(checksums),
        len(run_state),
        bytes_written,
        0,
        0,
        0,
    )
    into[:total] = 0
    cursor = HEADER_BYTES
    into[: len(header)] = np.frombuffer(header, np.uint8)
    for part, room in (
        (np.frombuffer(tensors, np.uint8), len(tensors)),
        (place, round_up(len(place), 8)),
        (checksums.astype("<u4", copy=False).view(np.uint8), round_up(4 * len(checksums), 8)),
        (np.frombuffer(run_state, np.uint8), len(run_state)),
    ):
        into[cursor : cursor + len(part)] = part
        cursor += room
    checksum = _body_checksum(into[:total], crc32c)
    into[_CRC_OFFSET:HEADER_BYTES] = np.frombuffer(_CRC.pack(checksum), np.uint8)
    return total


def restamp(raw: npt.NDArray[np.uint8], generation: int, dirty: bool, crc32c: Checksum) -> None:
    """Makes the catalog in ``raw`` that of ``generation`` with the same contents."""
    fields = list(_HEADER.unpack_from(raw.data))
    fields[2], fields[4] = _DIRTY if dirty else 0, generation
    raw[: _HEADER.size] = np.frombuffer(_HEADER.pack(*fields), np.uint8)
    checksum = _body_checksum(raw[: fields[5]], crc32c)
    raw[_CRC_OFFSET:HEADER_BYTES] = np.frombuffer(_CRC.pack(checksum), np.uint8)


def peek_total_bytes(raw: npt.NDArray[np.uint8], slot_bytes: int) -> int | None:
    """Returns the length that the header in ``raw`` claims, or None when it is no header or cannot be right."""
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)].tobytes() != MAGIC:
        return None
    total = int(_HEADER.unpack_from(raw.data)[5])
    return total if HEADER_BYTES <= total <= slot_bytes else None


def decode_catalog(
    raw: npt.NDArray[np.uint8], store_id: bytes, geometry: Geometry, path: str, crc32c: Checksum
) -> Catalog | None:
    """Returns the generation in ``raw``, or None when it is damaged or belongs to another store.

    Raises:
        StoreError: another catalog version, or a right checksum over contradictory fields.
    """
    total = peek_total_bytes(raw, len(raw))
    if total is None:
        return None
    raw = raw[:total]
    identity = int(_CRC.unpack_from(raw.data, _CRC_OFFSET)[0])
    if identity != _body_checksum(raw, crc32c):
        return None
    _, version, flags, owner, generation, _, *sizes = _HEADER.unpack_from(raw.data)
    if owner != store_id:
        return None
    if version != CATALOG_VERSION:
        raise StoreError(
            f"cannot open '{path}': its catalog is version {version}, this program reads version "
            f"{CATALOG_VERSION}; use the release of memascend-jax that wrote it"
        )
    tensors_bytes, tiles, units, run_state_bytes, bytes_written = sizes[:5]
    if catalog_bytes(tensors_bytes, tiles, units, run_state_bytes) != total:
        raise _contradiction(path, "its parts do not add up to its length")
    places_at = HEADER_BYTES + tensors_bytes
    units_at = places_at + round_up(tiles, 8)
    run_state_at = units_at + round_up(4 * units, 8)
    tensors = _decode_tensors(raw[HEADER_BYTES:places_at], geometry, path)
    place = raw[places_at : places_at + tiles].copy()
    if tiles != sum(t.layout.tiles for t in tensors) or units != sum(t.layout.units for t in tensors):
        raise _contradiction(path, "its tile counts do not match its tensors")
    _check_places(place, tensors, path)
    return Catalog(
        generation=generation,
        dirty=bool(flags & _DIRTY),
        identity=identity,
        run_state=raw[run_state_at:].tobytes(),
        bytes_written=bytes_written,
        tensors=tensors,
        place=place,
        checksums=raw[units_at : units_at + 4 * units].copy().view("<u4").astype(np.uint32, copy=False),
    )


def _decode_tensors(raw: npt.NDArray[np.uint8], geometry: Geometry, path: str) -> tuple[StoredTensor, ...]:
    head = _TABLE_HEAD.size
    if len(raw) < head:
        raise _contradiction(path, "its tensor table is cut short")
    count, dim_count, name_bytes = _TABLE_HEAD.unpack_from(raw.data)
    if round_up(head + count * _RECORD.itemsize + 8 * dim_count + name_bytes, 8) != len(raw):
        raise _contradiction(path, "its tensor table does not add up to its length")
    dims_at = head + count * _RECORD.itemsize
    names_at = dims_at + 8 * dim_count
    records: list[Any] = raw[head:dims_at].view(_RECORD).tolist()
    dims: list[int] = raw[dims_at:names_at].view("<i8").tolist()
    names = raw[names_at : names_at + name_bytes].tobytes()
    space = ExtentAllocator(0, geometry.capacity_bytes - geometry.scratch_bytes, geometry.block_bytes)
    tensors: dict[str, StoredTensor] = {}
    for record in records:
        try:
            tensor = _decode_tensor(record, dims, names, geometry.block_bytes)
            for address, nbytes in tensor.extents():
                space.reserve(address, nbytes)
        except (StoreError, ValueError, IndexError) as error:
            raise _contradiction(path, str(error)) from error
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise _contradiction(path, f"tensor '{tensor.name}' appears twice")
    return tuple(tensors.values())


def _decode_tensor(record: tuple[int, ...], dims: list[int], names: bytes, block_bytes: int) -> StoredTensor:
    name_start, name_bytes, dims_start, axes, dtype, flags, tile_elements, base0, base1 = record
    if name_start + name_bytes > len(names):
        raise ValueError("a name lies outside the table of names")
    sliced = bool(flags & _SLICE)
    taken = dims[dims_start : dims_start + axes * (3 if sliced else 1)]
    if len(taken) != axes * (3 if sliced else 1):
        raise ValueError("a shape lies outside the table of shapes")
    spec = TensorSpec(
        name=names[name_start : name_start + name_bytes].decode(),
        dtype=DTYPE_CODES[dtype],
        shape=tuple(taken[:axes]),
        tile_elements=None if flags & _ONE_TILE else tile_elements,
        row_access=bool(flags & _ROW_ACCESS),
        mutable=bool(flags & _MUTABLE),
        global_shape=tuple(taken[axes : 2 * axes]) if sliced else None,
        start=tuple(taken[2 * axes :]) if sliced else None,
    )
    if base0 < 0 or base1 < NO_PLACE:
        raise ValueError(f"tensor '{spec.name}' has a place at a negative address")
    return StoredTensor(TensorLayout(spec, block_bytes), (base0, base1))


def _check_places(place: npt.NDArray[np.uint8], tensors: Sequence[StoredTensor], path: str) -> None:
    known = (place == 0) | (place == 1) | (place == UNWRITTEN)
    single = np.repeat(
        np.array([tensor.places == 1 for tensor in tensors], np.bool_),
        np.array([tensor.layout.tiles for tensor in tensors], np.int64),
    )
    if not known.all() or (single & (place == 1)).any():
        raise _contradiction(path, "a tile is in a place that does not exist")


def _body_checksum(raw: npt.NDArray[np.uint8], crc32c: Checksum) -> int:
    return crc32c(raw[HEADER_BYTES:], crc32c(raw[:_CRC_OFFSET], 0))


def _contradiction(path: str, why: str) -> StoreError:
    return StoreError(
        f"cannot open '{path}': its catalog has a right checksum but {why}; it was not written by this program"
    )
