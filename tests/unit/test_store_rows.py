# SPDX-License-Identifier: Apache-2.0
"""Scattered rows: any row size against any block, tile and amount of memory."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from stores import ANY_DISK, backend_arguments, write

from memascend_jax.errors import StoreError
from memascend_jax.storage.engine import address_of, aligned_buffer
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

BF16 = ml_dtypes.bfloat16


def table(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-100, 100, (rows, columns)).astype(BF16)


#: (columns, tile_elements): 1,152-byte rows that share blocks, rows of half, one, two and an odd number of blocks,
#: rows that tiles cut, single elements.
SHAPES = [
    (576, None),
    (576, 4096),
    (1024, None),
    (2048, None),
    (4096, 8192),
    (4096, 6144),
    (5000, 2048),
    (1, None),
]


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize(("columns", "tile"), SHAPES)
@pytest.mark.parametrize("row_access", [True, False])
def test_rows_in_any_order_and_number(
    tmp_path: Path, backend: str, columns: int, tile: int | None, row_access: bool
) -> None:
    values = table(301, columns)
    spec = TensorSpec("e", "bfloat16", values.shape, tile_elements=tile, row_access=row_access)
    rng = np.random.default_rng(1)
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore.create(paths, specs=[spec], bounce_bytes=1 << 17, **backend_arguments(backend)) as store:
        store.write_elements("e", 0, values.reshape(-1))
        # Tiles in both places, so that neighbours on disk are not neighbours in the tensor.
        store.commit()
        for index in range(0, store.tiles("e"), 3):
            start, count = store.tile_span("e", index)
            write(store, "e", index, values.reshape(-1)[start : start + count])
        for rows in (
            [],
            [0],
            [300],
            [5, 5, 5],
            list(range(301)),
            list(range(300, -1, -2)),
            rng.integers(0, 301, 1000).tolist(),
        ):
            nbytes = len(rows) * columns * 2
            # Aligned memory takes rows of whole blocks without a copy; elsewhere they are copied.
            for memory in (aligned_buffer(nbytes), aligned_buffer(nbytes + 64)[64:]):
                out = memory.view(BF16).reshape(len(rows), columns)
                store.read_rows("e", np.array(rows, np.int64), out)
                np.testing.assert_array_equal(out, values[rows])


def test_rows_of_whole_blocks_go_to_aligned_memory_without_a_copy(place: list[Path]) -> None:
    values = table(12, 40960)
    spec = TensorSpec("e", "bfloat16", values.shape, tile_elements=81920, row_access=True)
    rows = np.array([11, 0, 7, 7])
    with TensorStore.create(place, specs=[spec], bounce_bytes=1 << 17, **ANY_DISK) as store:
        for tile in range(store.tiles("e")):
            start, count = store.tile_span("e", tile)
            write(store, "e", tile, values.reshape(-1)[start : start + count])
        nbytes = len(rows) * 81920
        # A row and a block are more than half of the memory for copies.
        with pytest.raises(StoreError, match="checksums are of 81,920 bytes, through 65,536 bytes of bounce"):
            store.write_elements("e", 0, values.reshape(-1))
        with pytest.raises(StoreError, match="through 65,536 bytes of bounce memory"):
            store.read_rows("e", rows, aligned_buffer(nbytes + 64)[64:].view(BF16).reshape(4, 40960))
        out = aligned_buffer(nbytes).view(BF16).reshape(4, 40960)
        before = store.counters().read_bytes
        store.read_rows("e", rows, out)
        np.testing.assert_array_equal(out, values[rows])
        assert store.counters().read_bytes - before == nbytes


def test_rows_read_in_place_are_checked(tmp_path: Path) -> None:
    values = table(2000, 4096)
    spec = TensorSpec("e", "bfloat16", values.shape, tile_elements=1 << 20, row_access=True)
    arguments = backend_arguments("io_uring")
    with TensorStore.create(tmp_path / "a", specs=[spec], **arguments) as store:
        store.write_elements("e", 0, values.reshape(-1))
        store.commit()
        path, offset = store._volume.locate(store._table.tensors["e"].bases[0] + 700 * 8192 + 4096)
    with Path(path).open("r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 1]))
    with TensorStore.open(tmp_path / "a", **arguments) as store:
        # In the second of three pieces that are on their way at once.
        out = aligned_buffer(1600 * 8192).view(BF16).reshape(1600, 4096)
        with pytest.raises(StoreError, match=r"'e' .* does not match its checksum"):
            store.read_rows("e", np.arange(1600), out)
        rows = np.delete(np.arange(1600), 700)
        store.read_rows("e", rows, out[:1599])
        np.testing.assert_array_equal(out[:1599], values[rows])


def test_each_block_is_read_once_however_many_rows_want_it(place: list[Path]) -> None:
    spec = TensorSpec("e", "bfloat16", (1000, 576), row_access=True)
    with TensorStore.create(place, specs=[spec], **ANY_DISK) as store:
        store.write_elements("e", 0, table(1000, 576).reshape(-1))
        for rows, blocks in [([0, 1, 2], 1), ([0, 1, 2, 3], 2), ([7, 7, 7], 1), ([0, 999], 2)]:
            before = store.counters().read_bytes
            store.read_rows("e", np.array(rows), np.empty((len(rows), 576), BF16))
            first = sorted(
                {row * 1152 // 4096 for row in rows} | {(row * 1152 + 1151) // 4096 for row in rows}
            )
            assert len(first) >= blocks
            assert store.counters().read_bytes - before == 4096 * len(first)


def test_rows_land_in_a_slot_without_a_copy(place: list[Path]) -> None:
    values = table(100, 576)
    spec = TensorSpec("e", "bfloat16", values.shape, row_access=True)
    rows = np.array([0, 99, 3, 64])
    with TensorStore.create(place, specs=[spec], **ANY_DISK) as store:
        store.write_elements("e", 0, values.reshape(-1))
        memory = aligned_buffer(4 * 8192)
        batch = store.batch()
        begins = batch.read_rows("e", rows, address_of(memory), 8192)
        batch.submit(memory).wait()
        for index, begin in enumerate(begins.tolist()):
            found = memory[index * 8192 + begin :][:1152].view(BF16)
            np.testing.assert_array_equal(found, values[rows[index]])
        with pytest.raises(StoreError, match=r"up to 8,192 bytes; use a multiple of 4,096"):
            batch.read_rows("e", rows, address_of(memory), 4096)


def test_wrong_rows_and_targets_are_refused(place: list[Path]) -> None:
    spec = TensorSpec("e", "bfloat16", (10, 576), row_access=True)
    with TensorStore.create(place, specs=[spec], bounce_bytes=1 << 17, **ANY_DISK) as store:
        out = np.empty((1, 576), BF16)
        for rows, target, message in [
            ([10], out, r"row 10 of tensor 'e': it has rows 0 to 9"),
            ([-1], out, "row -1"),
            ([0, 1], out, r"2 rows of tensor 'e' into an array of bfloat16 with shape \(1, 576\)"),
            ([0], out.astype(np.float32), "must be C-contiguous bfloat16"),
            ([0], np.empty((1, 1152), BF16)[:, ::2], "C-contiguous"),
            ([0], out, "never written"),
        ]:
            with pytest.raises(StoreError, match=message):
                store.read_rows("e", np.array(rows), target)
        with pytest.raises(StoreError, match="1-D array of integers"):
            store.read_rows("e", np.array([0.5]), out)
        with pytest.raises(StoreError, match="no tensor 'f'"):
            store.read_rows("f", np.array([0]), out)
