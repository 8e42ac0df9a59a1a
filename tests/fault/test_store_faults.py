# SPDX-License-Identifier: Apache-2.0
"""Failing disks and damaged bytes: a named error each time, never wrong data, and the store works again."""

from __future__ import annotations

import errno
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from simulated_disk import SimulatedDisk
from stores import ANY_DISK, abandon, read, slot, write

from memascend_jax.errors import StoreError
from memascend_jax.storage.checksum import crc32c_bytes
from memascend_jax.storage.engine import address_of
from memascend_jax.storage.layout import SUPERBLOCK_OFFSETS
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.fault

TILE = 1024
SPECS = [
    TensorSpec("w", "float32", (10 * TILE,), tile_elements=TILE),
    TensorSpec("rows", "bfloat16", (200, 576), row_access=True),
]


def values(add: int = 0) -> np.ndarray:
    return np.arange(10 * TILE, dtype=np.float32) + add


def bf16(count: int) -> np.ndarray:
    return (np.arange(count) % 251).astype(ml_dtypes.bfloat16)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def io(disk: SimulatedDisk) -> IoArguments:
    return {"direct_io": "off", "make_engine": disk.engine}


def filled(path: Path, io: IoArguments) -> TensorStore:
    """Returns a store with two generations, so that both catalog slots are in use."""
    store = TensorStore.create(path, specs=SPECS[:1], **io)
    store.write_elements("w", 0, values())
    store.commit(b"first")
    store.write_elements("w", 0, values(1))
    store.commit(b"second")
    return store


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_failed_write_is_raised_and_blocks_the_commit_until_it_is_repeated(
    tmp_path: Path, disk: SimulatedDisk, io: IoArguments
) -> None:
    store = filled(tmp_path / "s", io)
    disk.refuse = lambda kind, path, offset: errno.EIO if kind == "write" else 0
    with pytest.raises(
        StoreIOError, match=r"cannot write tensor 'w' in store .*s': .*Input/output"
    ) as caught:
        write(store, "w", 3, values(9)[3 * TILE : 4 * TILE])
    assert caught.value.errno == errno.EIO
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, StoreError)
    disk.refuse = lambda kind, path, offset: 0
    with pytest.raises(StoreError, match=r"cannot commit.*last write of 1 tiles failed \('w' tile 3\)"):
        store.commit()
    with pytest.raises(StoreError, match=r"cannot read tensor 'w': the last write of tile 3 failed"):
        read(store, "w")
    np.testing.assert_array_equal(read(store, "w", 0, 3 * TILE), values(1)[: 3 * TILE])
    write(store, "w", 3, values(9)[3 * TILE : 4 * TILE])
    assert store.commit() == 3
    store.close()


def test_failed_write_that_nobody_waits_for_is_found_by_the_commit(
    tmp_path: Path, disk: SimulatedDisk, io: IoArguments
) -> None:
    store = filled(tmp_path / "s", io)
    memory = slot(values(5)[:TILE])
    disk.refuse = lambda kind, path, offset: errno.ENOSPC if kind == "write" else 0
    batch = store.batch()
    batch.write_tile("w", 0, address_of(memory))
    batch.submit(memory)
    disk.refuse = lambda kind, path, offset: 0
    with pytest.raises(StoreError, match="cannot commit"):
        store.commit()
    store.close()
    with TensorStore.open(tmp_path / "s", **io) as store:
        np.testing.assert_array_equal(store.get("w"), values(1))


@pytest.mark.parametrize("kind", ["flush", "catalog"])
def test_failure_in_a_commit_ends_writing_and_keeps_the_last_generation(
    tmp_path: Path, disk: SimulatedDisk, io: IoArguments, kind: str
) -> None:
    store = filled(tmp_path / "s", io)
    store.write_elements("w", 0, values(2))
    catalogs = (1 << 17, 1 << 20)
    disk.refuse = lambda what, path, offset: (
        errno.EIO
        if what == "flush" == kind or (what == "write" and catalogs[0] <= offset < catalogs[1])
        else 0
    )
    with pytest.raises(StoreIOError, match=r"cannot (flush|write the metadata of) store"):
        store.commit(b"third")
    disk.refuse = lambda what, path, offset: 0
    with pytest.raises(StoreError, match=r"failed while committing generation 3.*open it again"):
        store.commit(b"third")
    with pytest.raises(StoreError, match="failed while committing"):
        store.write_elements("w", 0, values(3))
    assert store.generation == 2
    store.close()
    with TensorStore.open(tmp_path / "s", **io) as store:
        assert (store.generation, store.run_state) == (2, b"second")
        np.testing.assert_array_equal(store.get("w"), values(1))
        store.write_elements("w", 0, values(3))
        store.commit()


def test_failed_read_is_raised_and_the_next_one_succeeds(
    tmp_path: Path, disk: SimulatedDisk, io: IoArguments
) -> None:
    store = filled(tmp_path / "s", io)
    disk.refuse = lambda kind, path, offset: errno.EIO if kind == "read" else 0
    for attempt in (lambda: read(store, "w"), lambda: store.get("w")):
        with pytest.raises(StoreIOError, match=r"cannot read tensor 'w' in store"):
            attempt()
    report = store.verify()
    assert len(report.faults) == 10
    assert "cannot be read" in str(report.faults[0])
    disk.refuse = lambda kind, path, offset: 0
    np.testing.assert_array_equal(store.get("w"), values(1))
    store.close()


def test_verify_names_each_flipped_bit_by_tensor_path_and_offset(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    big = np.arange(3 << 20, dtype=np.float32)
    store = TensorStore.create(paths, capacity="64MiB", weights=(1, 2), **ANY_DISK)
    store.put("big", big)
    store.declare(SPECS[1])
    store.write_elements("rows", 0, bf16(200 * 576))
    store.commit()
    placed = [
        store._volume.locate(store._table.tensors["big"].bases[0] + tile * (4 << 20)) for tile in range(3)
    ]
    rows_at = store._volume.locate(store._table.tensors["rows"].bases[0] + 5 * 4096)
    store.close()
    flip(Path(placed[1][0]), placed[1][1] + 1000)
    flip(Path(rows_at[0]), rows_at[1] + 17)
    with TensorStore.open(paths, **ANY_DISK) as store:
        report = store.verify()
        assert [(fault.tensor, fault.member_path, fault.offset) for fault in report.faults] == [
            ("big", *placed[1]),
            ("rows", *rows_at),
        ]
        with pytest.raises(StoreError, match=r"tensor 'big' .* does not match its checksum"):
            store.get("big")
        np.testing.assert_array_equal(store.read_elements("big", 0, 1 << 20), big[: 1 << 20])
        out = np.empty((1, 576), bf16(0).dtype)
        store.read_rows("rows", np.array([0]), out)
        with pytest.raises(StoreError, match=r"'rows'.*does not match its checksum"):
            store.read_rows("rows", np.array([18]), out)
        # Writing the data again mends it.
        store.put("big", big)
        store.write_elements("rows", 0, bf16(200 * 576))
        assert store.verify().ok


def test_hot_reads_are_checked_when_asked_to(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", ANY_DISK)
    where = store._volume.locate(store._table.tensors["w"].bases[int(store._table.tensors["w"].place[4])])
    store.close()
    flip(Path(where[0]), where[1] + 4 * 4096)
    with TensorStore.open(tmp_path / "s", check_reads=True, **ANY_DISK) as store:
        read(store, "w", 0, 4 * TILE)
        with pytest.raises(StoreError, match="does not match its checksum"):
            read(store, "w")


def test_either_copy_of_the_superblock_is_enough_and_the_other_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "s"
    filled(path, ANY_DISK).close()
    for offset in SUPERBLOCK_OFFSETS:
        flip(path, offset + 30)
        with TensorStore.open(path, **ANY_DISK) as store:
            np.testing.assert_array_equal(store.get("w"), values(1))
    for offset in SUPERBLOCK_OFFSETS:
        flip(path, offset + 30)
    with pytest.raises(StoreError, match="both copies of its superblock are damaged"):
        TensorStore.open(path, **ANY_DISK)


def test_damaged_older_catalog_is_checked_around_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = filled(path, ANY_DISK)
    older = store._volume.geometry.catalog_slot(1)
    store.close()
    flip(path, older + 200)
    for _ in range(2):
        with TensorStore.open(path, **ANY_DISK) as store:
            assert store.generation == 2
            np.testing.assert_array_equal(store.get("w"), values(1))


@pytest.mark.parametrize("damage", ["bit", "zeroed", "torn"])
def test_damaged_newest_catalog_never_yields_mixed_data(tmp_path: Path, damage: str) -> None:
    """Generation 1 is left, but generation 3 was written over its tiles: only the checksums can tell."""
    path = tmp_path / "s"
    store = filled(path, ANY_DISK)
    store.write_elements("w", 0, values(2)[: 3 * TILE])
    store.commit(b"third")
    newest = store._volume.geometry.catalog_slot(1)
    store.write_elements("w", 0, values(3)[:TILE])
    store.close()
    if damage == "bit":
        flip(path, newest + 77)
    else:
        with path.open("r+b") as file:
            file.seek(newest)
            file.write(bytes(4096 if damage == "zeroed" else 512))
    with pytest.raises(
        StoreError, match=r"at generation 2: 1 of 10 tiles do not match.*newer one is damaged"
    ):
        TensorStore.open(path, **ANY_DISK)
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        assert [fault.tensor for fault in store.verify().faults] == ["w"]


def test_damaged_newest_catalog_on_one_member_is_taken_from_the_other(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = TensorStore.create(paths, specs=SPECS[:1], **ANY_DISK)
    for add in range(3):
        store.write_elements("w", 0, values(add))
        store.commit(bytes([add]))
    newest = store._volume.geometry.catalog_slot(1)
    store.close()
    flip(paths[0], newest + 300)
    for _ in range(2):
        with TensorStore.open(paths, **ANY_DISK) as store:
            assert (store.generation, store.run_state) == (3, b"\2")
            np.testing.assert_array_equal(store.get("w"), values(2))


def test_member_that_missed_the_last_commit_is_brought_up_to_it(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = TensorStore.create(paths, specs=SPECS[:1], **ANY_DISK)
    store.write_elements("w", 0, values())
    store.commit(b"one")
    slot_of_two = store._volume.geometry.catalog_slot(0)
    size = store._volume.geometry.catalog_bytes
    before = paths[1].read_bytes()[slot_of_two : slot_of_two + size]
    store.write_elements("w", 0, values(1))
    store.commit(b"two")
    store.close()
    with paths[1].open("r+b") as file:
        file.seek(slot_of_two)
        file.write(before)
    for damaged in (None, paths[0]):
        if damaged is not None:
            flip(damaged, slot_of_two)
        with TensorStore.open(paths, **ANY_DISK) as store:
            assert (store.generation, store.run_state) == (2, b"two")
            np.testing.assert_array_equal(store.get("w"), values(1))


def test_no_readable_catalog_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = filled(path, ANY_DISK)
    slots = [store._volume.geometry.catalog_slot(slot) for slot in (0, 1)]
    store.close()
    for offset in slots:
        flip(path, offset)
    with pytest.raises(StoreError, match="none of its 2 catalog copies is readable"):
        TensorStore.open(path, **ANY_DISK)


def test_flipped_bit_is_found_when_opening_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = filled(path, ANY_DISK)
    tensor = store._table.tensors["w"]
    _, offset = store._volume.locate(tensor.bases[int(tensor.place[7])] + 7 * 4096)
    abandon(store)
    flip(path, offset + 5)
    with pytest.raises(StoreError, match=r"1 of 10 tiles do not match.*first: tensor 'w' at .* offset"):
        TensorStore.open(path, **ANY_DISK)
    with TensorStore.open(path, check_after_crash=False, **ANY_DISK) as store:
        assert not store.verify().ok
    # It was closed: now only who asks for it is told.
    TensorStore.open(path, **ANY_DISK).close()
    with pytest.raises(StoreError, match=r"1 of 10 tiles do not match.*first: tensor 'w' at .* offset"):
        TensorStore.open(path, check_always=True, **ANY_DISK)


def test_members_missing_repeated_foreign_and_truncated_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    TensorStore.create(paths, capacity="4MiB", **ANY_DISK).close()
    other = [tmp_path / "c", tmp_path / "d"]
    TensorStore.create(other, capacity="4MiB", **ANY_DISK).close()
    with pytest.raises(StoreError, match=r"has 2 members, 1 of them were given; missing: member 1"):
        TensorStore.open(paths[0], **ANY_DISK)
    with pytest.raises(StoreError, match=r"'.*/d' belongs to another store"):
        TensorStore.open([paths[0], other[1]], **ANY_DISK)
    with pytest.raises(StoreError, match=r"are the same file"):
        TensorStore.open([paths[0], paths[0]], **ANY_DISK)
    length = paths[1].stat().st_size
    with paths[1].open("r+b") as file:
        file.truncate(length - 4096)
    with pytest.raises(
        StoreError, match=rf"'.*/b' has {length - 4096:,} bytes, the store needs {length:,} \(4.00 KiB more\)"
    ):
        TensorStore.open(paths, **ANY_DISK)
    with paths[1].open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(StoreError, match=r"'.*/b'.*not a memascend store|superblock|bytes"):
        TensorStore.open(paths, **ANY_DISK)


def test_other_format_version_is_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "s"
    filled(path, ANY_DISK).close()
    with path.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset)
            block = bytearray(file.read(512))
            block[8:12] = (7).to_bytes(4, "little")
            block[508:] = crc32c_bytes(bytes(block[:508])).to_bytes(4, "little")
            file.seek(offset)
            file.write(block)
    with pytest.raises(StoreError, match=r"store format is version 7, this program reads version 1"):
        TensorStore.open(path, **ANY_DISK)
