# SPDX-License-Identifier: Apache-2.0
"""Superblock, session mark, catalog and the choice between catalogs: bytes in, records out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from memascend_jax.dtypes import BY_NAME
from memascend_jax.errors import StoreError
from memascend_jax.storage.catalog import (
    DTYPE_CODES,
    HEADER_BYTES,
    Catalog,
    catalog_bytes,
    decode_catalog,
    encode_catalog,
    encode_tensors,
    restamp,
)
from memascend_jax.storage.checksum import crc32c_array, crc32c_bytes
from memascend_jax.storage.layout import Geometry, plan_geometry
from memascend_jax.storage.recovery import Slot, choose_generation
from memascend_jax.storage.spec import TensorLayout, TensorSpec
from memascend_jax.storage.superblock import (
    Superblock,
    decode_session,
    decode_superblock,
    encode_session,
)
from memascend_jax.storage.tile_table import NO_PLACE, StoredTensor, TileTable

STORE = bytes(range(16))
GEOMETRY = plan_geometry(
    capacity_bytes=1 << 20, scratch_bytes=1 << 16, catalog_bytes=1 << 16, block_bytes=4096, weights=[2, 1]
)
SPECS = [
    TensorSpec("model.embed", "bfloat16", (100, 576), row_access=True),
    TensorSpec("w#mu", "float32", (5000,), tile_elements=1024),
    TensorSpec("名前", "int64", ()),
    TensorSpec("part", "float16", (2, 3), global_shape=(8, 3), start=(4, 0), mutable=False),
    TensorSpec("empty", "bool", (0, 4)),
]


def superblock(geometry: Geometry = GEOMETRY, ready: bool = True) -> Superblock:
    return Superblock(STORE, 1, geometry, "step", 1234.5, ready)


def stored(specs: Sequence[TensorSpec] = SPECS) -> TileTable:
    table = TileTable()
    cursor = 0
    for spec in specs:
        layout = TensorLayout(spec, 4096)
        bases = [cursor, NO_PLACE]
        cursor += layout.place_bytes
        if spec.mutable:
            bases[1] = cursor
            cursor += layout.place_bytes
        table.add(StoredTensor(layout, (bases[0], bases[1])))
        tensor = table.tensors[spec.name]
        tensor.place[:] = np.arange(layout.tiles) % (2 if spec.mutable else 1)
        tensor.checksums[:] = np.arange(layout.units) * 2654435761 % (1 << 32)
    return table


def encoded(table: TileTable, generation: int = 7, run_state: bytes = b"run") -> np.ndarray:
    tensors = encode_tensors(list(table.tensors.values()))
    size = catalog_bytes(len(tensors), table.tiles, table.units, len(run_state))
    raw = np.full(size, 0xAA, np.uint8)
    written = encode_catalog(
        raw,
        store_id=STORE,
        generation=generation,
        dirty=False,
        run_state=run_state,
        bytes_written=99,
        tensors=tensors,
        place=table.place,
        checksums=table.checksums,
        crc32c=crc32c_array,
    )
    assert written == size
    return raw


def decode(raw: np.ndarray, store_id: bytes = STORE) -> Catalog | None:
    return decode_catalog(raw, store_id, GEOMETRY, "/a/path", crc32c_array)


def sealed(raw: np.ndarray) -> np.ndarray:
    """Returns ``raw`` with the checksum that its bytes now have: what a malicious or buggy writer would leave."""
    raw = raw.copy()
    checksum = crc32c_array(raw[HEADER_BYTES:], crc32c_array(raw[: HEADER_BYTES - 4]))
    raw[HEADER_BYTES - 4 : HEADER_BYTES] = np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)
    return raw


def test_superblock_comes_back_as_it_was() -> None:
    for block in (superblock(), superblock(ready=False)):
        raw = block.encode(crc32c_bytes)
        assert len(raw) == 4096
        assert decode_superblock(raw, "p", crc32c_bytes) == block
        assert decode_superblock(raw[:512], "p", crc32c_bytes) == block


def test_superblock_with_any_flipped_bit_is_none() -> None:
    raw = superblock().encode(crc32c_bytes)
    for byte in range(512):
        damaged = bytearray(raw)
        damaged[byte] ^= 1 << byte % 8
        assert decode_superblock(bytes(damaged), "p", crc32c_bytes) is None
    assert decode_superblock(raw[:100], "p", crc32c_bytes) is None
    assert decode_superblock(b"", "p", crc32c_bytes) is None


@pytest.mark.parametrize("field", range(12, 500, 4))
def test_sealed_nonsense_in_a_superblock_is_refused_or_harmless(field: int) -> None:
    """Whatever a field says, decoding never fails in another way and never returns sizes that do not fit."""
    for value in (0, 1, 0xFFFFFFFF, 0x80000000, 77):
        raw = bytearray(superblock().encode(crc32c_bytes)[:512])
        raw[field : field + 4] = value.to_bytes(4, "little")
        raw[508:] = crc32c_bytes(bytes(raw[:508])).to_bytes(4, "little")
        try:
            found = decode_superblock(bytes(raw), "/the/path", crc32c_bytes)
        except StoreError as error:
            assert "/the/path" in str(error)
        else:
            assert found is not None
            sizes = found.geometry
            assert sizes.scratch_bytes <= sizes.capacity_bytes == GEOMETRY.capacity_bytes
            assert sizes.block_bytes <= sizes.catalog_bytes
            assert sizes.member_bytes(1) == GEOMETRY.member_bytes(1)


def test_session_mark_tells_whether_it_was_closed_and_whose_it_is() -> None:
    for closed in (False, True):
        raw = encode_session(STORE, 41, closed, 4096, crc32c_bytes)
        assert decode_session(raw, STORE, crc32c_bytes) == (41, closed)
        assert decode_session(raw, bytes(16), crc32c_bytes) == (0, False)
        assert decode_session(raw[:8] + b"?" + raw[9:], STORE, crc32c_bytes) == (0, False)


def test_catalog_comes_back_as_it_was() -> None:
    table = stored()
    found = decode(encoded(table))
    assert found is not None
    assert (found.generation, found.dirty, found.run_state, found.bytes_written) == (7, False, b"run", 99)
    assert [tensor.layout.spec for tensor in found.tensors] == SPECS
    assert [tensor.bases for tensor in found.tensors] == [t.bases for t in table.tensors.values()]
    np.testing.assert_array_equal(found.place, table.place)
    np.testing.assert_array_equal(found.checksums, table.checksums)


def test_catalog_of_no_tensors_and_no_state_comes_back() -> None:
    found = decode(encoded(TileTable(), 0, b""))
    assert found is not None
    assert (found.tensors, found.run_state, len(found.place)) == ((), b"", 0)


def test_catalog_with_any_flipped_bit_is_none() -> None:
    raw = encoded(stored())
    for byte in range(len(raw)):
        damaged = raw.copy()
        damaged[byte] ^= 1 << byte % 8
        assert decode(damaged) is None
    for length in (0, 8, 127, 128, len(raw) - 1):
        assert decode(raw[:length]) is None
    assert decode(raw, bytes(16)) is None


def test_restamped_catalog_is_another_generation_of_the_same_contents() -> None:
    raw = encoded(stored())
    restamp(raw, 8, True, crc32c_array)
    found = decode(raw)
    assert found is not None
    assert (found.generation, found.dirty, found.run_state) == (8, True, b"run")
    assert [tensor.layout.spec for tensor in found.tensors] == SPECS


@pytest.mark.parametrize("offset", range(0, 600, 4))
def test_sealed_nonsense_in_a_catalog_is_refused_or_harmless(offset: int) -> None:
    original = encoded(stored())
    for value in (0, 1, 3, 0x7FFFFFFF, 0xFFFFFFFF):
        raw = original.copy()
        raw[offset : offset + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
        try:
            found = decode(sealed(raw))
        except StoreError as error:
            assert "/a/path" in str(error)
            continue
        if found is not None:
            check_harmless(found)


def check_harmless(catalog: Catalog) -> None:
    """No two places overlap and all lie within the tensors' part of the store."""
    end = GEOMETRY.capacity_bytes - GEOMETRY.scratch_bytes
    extents = sorted(extent for tensor in catalog.tensors for extent in tensor.extents() if extent[1])
    cursor = 0
    for address, nbytes in extents:
        assert address >= cursor
        assert address % 4096 == 0
        cursor = address + nbytes
    assert cursor <= end
    assert len(catalog.place) == sum(tensor.layout.tiles for tensor in catalog.tensors)
    assert len(catalog.checksums) == sum(tensor.layout.units for tensor in catalog.tensors)


def test_catalog_of_another_version_is_refused_naming_both() -> None:
    raw = encoded(stored())
    raw[8] = 9
    with pytest.raises(StoreError, match="catalog is version 9, this program reads version 1"):
        decode(sealed(raw))


def test_dtype_codes_on_disk_never_change() -> None:
    assert DTYPE_CODES == (
        "bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16",
        "uint16", "int32", "uint32", "int64", "uint64", "bool",
    )  # fmt: skip
    assert set(DTYPE_CODES) == set(BY_NAME)


def catalog(generation: int, identity: int = 0) -> Catalog:
    empty = np.empty(0, np.uint8)
    return Catalog(generation, False, identity, b"", 0, (), empty, empty.astype(np.uint32))


def slots(*members: tuple[int | None, int | None]) -> list[Slot]:
    """Per member what slots 0 and 1 hold: a generation, None (damaged) or -1 (blank)."""
    return [
        Slot(member, slot, None if held is None or held < 0 else catalog(held), held == -1)
        for member, pair in enumerate(members)
        for slot, held in enumerate(pair)
    ]


@pytest.mark.parametrize(
    ("members", "generation", "trusted", "stale"),
    [
        ([(0, -1)], 0, True, []),
        ([(0, 1)], 1, True, []),
        ([(4, 3)], 4, True, []),
        ([(4, 5)], 5, True, []),
        ([(4, 4)], 4, True, []),
        # The slot of a later generation is damaged, lost or older than it can be.
        ([(4, None)], 4, False, [(0, 1)]),
        ([(None, 5)], 5, False, [(0, 0)]),
        ([(4, -1)], 4, False, [(0, 1)]),
        ([(4, 1)], 4, False, [(0, 1)]),
        # A generation counts once one member holds it; the others are brought up to it.
        ([(4, 5), (4, 3)], 5, True, [(1, 1)]),
        ([(4, 5), (4, None)], 5, True, [(1, 1)]),
        ([(4, 5), (None, 5)], 5, False, [(1, 0)]),
        ([(4, 3), (4, None)], 4, False, [(1, 1)]),
        ([(0, 1), (0, -1)], 1, True, [(1, 1)]),
    ],
)
def test_newest_generation_wins_and_is_trusted_only_when_no_later_one_can_have_been(
    members: list[tuple[int | None, int | None]], generation: int, trusted: bool, stale: list[tuple[int, int]]
) -> None:
    choice = choose_generation(slots(*members), "p")
    assert (choice.catalog.generation, choice.trusted, list(choice.stale)) == (generation, trusted, stale)


def test_members_that_disagree_about_a_generation_are_refused() -> None:
    held = [Slot(0, 0, catalog(4, 1), False), Slot(1, 0, catalog(4, 2), False)]
    with pytest.raises(StoreError, match="different catalogs of generation 4"):
        choose_generation(held, "p")
    with pytest.raises(StoreError, match="none of its 2 catalog copies is readable"):
        choose_generation(slots((None, -1)), "p")
