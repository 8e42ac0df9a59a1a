# SPDX-License-Identifier: Apache-2.0
"""What a tensor in the store is, and the arithmetic of its tiles. Pure: no file, no address.

A tensor is flattened and cut into tiles of ``tile_elements``; the last tile may be shorter. A tile is the unit
of writing, of the two places and of the checksum. On disk each tile fills whole blocks, so a tensor of several
tiles needs tiles that are a multiple of the block: then all tiles of a place lie back to back and any run of
them is one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memascend_jax.dtypes import BY_NAME, to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.storage.layout import check_block_bytes
from memascend_jax.storage.whole_number import ANY_SIZE, MAX_WHOLE_NUMBER, listed, whole_number
from memascend_jax.units import round_up

#: A checksum unit never grows past this, so that one row read verifies little more than it uses.
MAX_ROW_UNIT_BYTES = 1 << 20
MAX_NAME_BYTES = 4096
MAX_DIMENSIONS = 16
MAX_TENSOR_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, element type and shape, and how it is kept.

    Args:
        name: unique in the store, any text without NUL, at most 4,096 bytes in UTF-8.
        dtype: one of ``memascend_jax.dtypes.BY_NAME``.
        shape: of the part that this store holds.
        tile_elements: elements per tile; None: one tile, the whole tensor.
        row_access: rows (index of the first axis) are read alone: one checksum per group of blocks.
        mutable: False: written once, then read-only; one place on disk in every durability.
        global_shape, start: the tensor that this store's part is a slice of, for sharded tensors; None: the
            part is the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tile_elements: int | None = None
    row_access: bool = False
    mutable: bool = True
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None


class TensorLayout:
    """A checked ``TensorSpec`` cut into tiles of blocks.

    Raises:
        StoreError: the spec names an unknown dtype, has a negative or overflowing shape, a bad tile size, a
            name that is empty or too long, a slice outside its global shape, or a field of the wrong type.
    """

    def __init__(self, spec: TensorSpec, block_bytes: int) -> None:
        spec = self.spec = _checked_types(spec)
        self.block_bytes = block_bytes
        if spec.dtype not in BY_NAME:
            raise StoreError(
                f"tensor '{spec.name}': unknown dtype {spec.dtype!r}; the store knows {', '.join(BY_NAME)}"
            )
        self.itemsize = to_dtype(spec.dtype).itemsize
        self.elements = _checked_elements(spec, self.itemsize)
        self.nbytes = self.elements * self.itemsize
        self.tile_elements, self.tiles = _checked_tiles(spec, self.elements, self.itemsize, block_bytes)
        self.tile_bytes = self.tile_elements * self.itemsize
        self.place_bytes = round_up(self.nbytes, block_bytes)
        self._last_bytes = self.nbytes - (self.tiles - 1) * self.tile_bytes
        self._last_disk_bytes = round_up(self._last_bytes, block_bytes)
        self.row_elements = math.prod(spec.shape[1:]) if spec.shape else 1
        self.row_bytes = self.row_elements * self.itemsize
        self.unit_bytes = self._unit_bytes()
        #: Checksums per full tile; the last tile may have fewer.
        self.units_per_tile = -(-self.tile_bytes // self.unit_bytes) if self.unit_bytes else 1
        self.units = self._units()
        _check_slice(spec)

    def _unit_bytes(self) -> int:
        if not self.spec.row_access or self.elements == 0:
            return 0
        block, row = self.block_bytes, self.row_bytes
        whole_rows = row % block == 0 and row <= MAX_ROW_UNIT_BYTES and self.tile_bytes % row == 0
        return row if whole_rows else block

    def _units(self) -> int:
        if not self.unit_bytes:
            return self.tiles
        full = (self.tiles - 1) * self.units_per_tile
        return full + -(-self._last_bytes // self.unit_bytes)

    def tile_span(self, tile: int) -> tuple[int, int]:
        """Returns (first element, number of elements) of ``tile``."""
        first = tile * self.tile_elements
        return first, min(self.tile_elements, self.elements - first)

    def disk_span(self, tile: int) -> tuple[int, int, int]:
        """Returns (first byte within a place, bytes, bytes on disk) of ``tile``; on the step path."""
        if tile == self.tiles - 1:
            return tile * self.tile_bytes, self._last_bytes, self._last_disk_bytes
        return tile * self.tile_bytes, self.tile_bytes, self.tile_bytes


def layouts_of(specs: Sequence[TensorSpec], block_bytes: int) -> list[TensorLayout]:
    """Returns the layouts of ``specs``; raises ``StoreError`` on a bad or repeated one."""
    check_block_bytes(block_bytes)
    seen: set[str] = set()
    layouts = []
    for spec in listed(specs, "specs", "a sequence of TensorSpec"):
        layout = TensorLayout(spec, block_bytes)
        if layout.spec.name in seen:
            raise StoreError(f"tensor '{layout.spec.name}' is declared twice; names in a store are unique")
        seen.add(layout.spec.name)
        layouts.append(layout)
    return layouts


def _checked_types(spec: TensorSpec) -> TensorSpec:
    """Returns ``spec`` in plain Python types: what passes here can be written to a catalog."""
    if not isinstance(spec, TensorSpec):
        raise StoreError(f"a tensor is declared with a TensorSpec, got {spec!r} ({type(spec).__name__})")
    _check_name(spec)
    of = f"tensor '{spec.name}'"
    if not isinstance(spec.dtype, str):
        raise StoreError(
            f"{of}: dtype must be a name such as 'float32', got {spec.dtype!r} ({type(spec.dtype).__name__})"
        )
    for field in ("row_access", "mutable"):
        value = getattr(spec, field)
        if not isinstance(value, (bool, np.bool_)):
            raise StoreError(f"{of}: {field} must be True or False, got {value!r} ({type(value).__name__})")
    return replace(
        spec,
        shape=_whole_numbers(spec.shape, f"{of}: shape"),
        tile_elements=None
        if spec.tile_elements is None
        else whole_number(spec.tile_elements, f"{of}: tile_elements", least=ANY_SIZE),
        row_access=bool(spec.row_access),
        mutable=bool(spec.mutable),
        global_shape=None
        if spec.global_shape is None
        else _whole_numbers(spec.global_shape, f"{of}: global_shape"),
        start=None if spec.start is None else _whole_numbers(spec.start, f"{of}: start"),
    )


def _whole_numbers(values: Sequence[int], what: str) -> tuple[int, ...]:
    """Returns ``values`` as a tuple of int; what they may be is checked by those who know what they are."""
    numbers = listed(values, what, "one whole number per axis")
    return tuple(
        whole_number(value, f"{what} {tuple(numbers)!r}: axis {axis}", least=ANY_SIZE)
        for axis, value in enumerate(numbers)
    )


def _check_name(spec: TensorSpec) -> None:
    if not isinstance(spec.name, str):
        raise StoreError(f"a tensor's name must be a str, got {spec.name!r} ({type(spec.name).__name__})")
    try:
        size = len(spec.name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= MAX_NAME_BYTES or "\0" in spec.name:
        raise StoreError(
            f"tensor name {spec.name[:80]!r}: a name is 1 to {MAX_NAME_BYTES:,} bytes of UTF-8 without NUL"
        )


def _checked_elements(spec: TensorSpec, itemsize: int) -> int:
    if len(spec.shape) > MAX_DIMENSIONS or any(extent < 0 for extent in spec.shape):
        raise StoreError(
            f"tensor '{spec.name}': shape {spec.shape} must have at most {MAX_DIMENSIONS} axes, none negative"
        )
    # Empty tensors too: NumPy has no array whose other axes overflow.
    if math.prod(max(extent, 1) for extent in spec.shape) * itemsize > MAX_TENSOR_BYTES:
        raise StoreError(f"tensor '{spec.name}': shape {spec.shape} is more than {MAX_TENSOR_BYTES:,} bytes")
    return math.prod(spec.shape)


def _checked_tiles(spec: TensorSpec, elements: int, itemsize: int, block_bytes: int) -> tuple[int, int]:
    """Returns (elements per tile, tiles). An empty tensor has one empty tile, so that it can be written."""
    if spec.tile_elements is None or 0 <= elements <= spec.tile_elements:
        return elements, 1
    if spec.tile_elements <= 0:
        raise StoreError(f"tensor '{spec.name}': tile_elements must be positive, got {spec.tile_elements}")
    if spec.tile_elements * itemsize % block_bytes:
        raise StoreError(
            f"tensor '{spec.name}': a tile of {spec.tile_elements:,} elements is "
            f"{spec.tile_elements * itemsize:,} bytes, not a multiple of the block of {block_bytes:,} bytes; "
            f"use a multiple of {block_bytes // math.gcd(block_bytes, itemsize):,} elements"
        )
    return spec.tile_elements, -(-elements // spec.tile_elements)


def _check_slice(spec: TensorSpec) -> None:
    if spec.global_shape is None and spec.start is None:
        return
    whole = spec.shape if spec.global_shape is None else spec.global_shape
    start = (0,) * len(spec.shape) if spec.start is None else spec.start
    axes = len(whole) == len(start) == len(spec.shape)
    if not axes or any(s < 0 or s + n > g for s, n, g in zip(start, spec.shape, whole, strict=True)):
        raise StoreError(
            f"tensor '{spec.name}': the slice of shape {spec.shape} at {start} is outside the global shape {whole}"
        )
    if math.prod(max(extent, 1) for extent in whole) > MAX_WHOLE_NUMBER:
        raise StoreError(
            f"tensor '{spec.name}': the global shape {whole} is more than {MAX_WHOLE_NUMBER:,} elements"
        )
