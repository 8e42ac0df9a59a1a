# SPDX-License-Identifier: Apache-2.0
"""The store's public surface, over both engines and one to three members."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from places import PLACES, BlockDevices
from stores import ANY_DISK, abandon, backend_arguments, read, slot, write

from memascend_jax.errors import StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.storage.engine import address_of, aligned_buffer
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.store_errors import DirtyStoreError
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore, bytes_needed

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float64, np.float16, BF16, np.int8, np.uint16, np.int64, np.bool_]


@pytest.fixture(params=["io_uring", "threads"])
def io(request: pytest.FixtureRequest) -> IoArguments:
    return backend_arguments(request.param)


@pytest.fixture(params=[*PLACES, "2 files", "3 unequal files"])
def members(
    request: pytest.FixtureRequest, tmp_path: Path, block_devices: BlockDevices
) -> tuple[list[Path], tuple[int, ...]]:
    files = {"2 files": (1, 1), "3 unequal files": (3, 1, 2)}
    if request.param in files:
        weights = files[request.param]
        return [tmp_path / f"m{index}.store" for index in range(len(weights))], weights
    paths = block_devices.paths(request.param, tmp_path)
    return paths, (1, 2, 1)[: len(paths)]


def numbers(count: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, count).astype(dtype)


def test_arrays_of_any_type_and_length_survive_reopening(
    members: tuple[list[Path], tuple[int, ...]], io: IoArguments
) -> None:
    paths, weights = members
    arrays = {
        f"{np.dtype(dtype).name}/{count}": numbers(count, dtype)
        for dtype in DTYPES
        for count in (0, 1, 7, 2047, 2048, 2049, 300_001)
    }
    arrays["scalar"] = np.float32(3.5).reshape(())
    arrays["matrix"] = numbers(35).reshape(5, 7)
    with TensorStore.create(paths, capacity="64MiB", weights=weights, **io) as store:
        for name, array in arrays.items():
            store.put(name, array)
        assert store.commit(b"state") == 1
    with TensorStore.open(paths, **io) as store:
        assert store.names() == list(arrays)
        assert (store.generation, store.run_state) == (1, b"state")
        for name, array in arrays.items():
            found = store.get(name)
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            np.testing.assert_array_equal(found, array)
        assert store.verify().ok


def test_uncommitted_writes_are_seen_at_once_and_gone_after_reopening(
    place: list[Path], io: IoArguments
) -> None:
    spec = TensorSpec("w", "float32", (4096,), tile_elements=1024)
    old, new = numbers(4096), numbers(4096, seed=1)
    with TensorStore.create(place, specs=[spec], **io) as store:
        store.write_elements("w", 0, old)
        store.commit()
        write(store, "w", 2, new[2048:3072])
        mixed = np.concatenate([old[:2048], new[2048:3072], old[3072:]])
        np.testing.assert_array_equal(read(store, "w"), mixed)
        np.testing.assert_array_equal(store.get("w"), mixed)
    with TensorStore.open(place, **io) as store:
        np.testing.assert_array_equal(store.get("w"), old)


def test_each_tile_keeps_its_own_place_over_many_partial_commits(
    members: tuple[list[Path], tuple[int, ...]], io: IoArguments
) -> None:
    paths, weights = members
    rng = np.random.default_rng(3)
    spec = TensorSpec("w", "float32", (10_000,), tile_elements=1024)
    model = numbers(10_000)
    with TensorStore.create(paths, specs=[spec], weights=weights, **io) as store:
        store.write_elements("w", 0, model)
        store.commit()
        for step in range(12):
            for tile in rng.choice(10, size=rng.integers(1, 5), replace=False):
                start, count = store.tile_span("w", int(tile))
                model[start : start + count] = numbers(count, seed=step)
                write(store, "w", int(tile), model[start : start + count])
            np.testing.assert_array_equal(read(store, "w"), model)
            store.commit(bytes([step]))
    with TensorStore.open(paths, **io) as store:
        np.testing.assert_array_equal(store.get("w"), model)
        assert store.run_state == bytes([11])


def test_one_batch_moves_many_tensors(members: tuple[list[Path], tuple[int, ...]], io: IoArguments) -> None:
    paths, weights = members
    specs = [TensorSpec(f"t{i}", "float32", (3000,), tile_elements=1024) for i in range(20)]
    values = {spec.name: numbers(3000, seed=index) for index, spec in enumerate(specs)}
    with TensorStore.create(paths, specs=specs, weights=weights, **io) as store:
        memories = {name: slot(array) for name, array in values.items()}
        batch = store.batch()
        for name, memory in memories.items():
            for tile in range(3):
                batch.write_tile(name, tile, address_of(memory) + tile * 4096)
        ticket = batch.submit(memories)
        ticket.wait()
        assert ticket.done()
        assert ticket.nbytes == 20 * 3 * 4096
        target = aligned_buffer(20 * 3 * 4096)
        for index, spec in enumerate(specs):
            batch.read(spec.name, address_of(target) + index * 3 * 4096)
        batch.submit(target).wait()
        for index, array in enumerate(values.values()):
            found = target[index * 12288 :][:12000].view(np.float32)
            np.testing.assert_array_equal(found, array)


def test_tensors_declared_in_order_are_read_as_one_request(place: list[Path]) -> None:
    specs = [TensorSpec(f"t{i}", "float32", (2048,), tile_elements=1024) for i in range(8)]
    with TensorStore.create(place, specs=specs, **ANY_DISK) as store:
        for spec in specs:
            store.write_elements(spec.name, 0, numbers(2048))
        target = aligned_buffer(8 * 8192)
        before = store.counters().read_requests
        batch = store.batch()
        for index, spec in enumerate(specs):
            batch.read(spec.name, address_of(target) + index * 8192)
        batch.submit(target).wait()
        assert store.counters().read_requests == before + 1


def test_tail_of_the_last_block_is_zeroed_and_never_visible(place: list[Path]) -> None:
    with TensorStore.create(place, specs=[TensorSpec("w", "uint8", (10,))], **ANY_DISK) as store:
        memory = aligned_buffer(4096)
        memory[:] = 255
        batch = store.batch()
        batch.write_tile("w", 0, address_of(memory))
        batch.submit(memory).wait()
        assert memory[:10].all()
        assert not memory[10:].any()
        assert store.get("w").tolist() == [255] * 10


def test_reads_and_writes_use_slots_of_an_arena(place: list[Path], io: IoArguments) -> None:
    arena = PinnedArena(16 << 20)
    with TensorStore.create(place, capacity="1MiB", arena=arena, bounce_bytes=1 << 20, **io) as store:
        lease = arena.allocate(8192, "test")
        store.declare(TensorSpec("w", "float32", (2048,), tile_elements=1024))
        lease.view(0, 8192)[:] = 7
        batch = store.batch()
        for tile in (0, 1):
            batch.write_tile("w", tile, lease.address + tile * 4096)
        batch.submit(lease).wait()
        lease.view(0, 8192)[:] = 0
        batch.read("w", lease.address)
        batch.submit(lease).wait()
        assert (np.asarray(lease.view(0, 8192)) == 7).all()
        lease.release()
    arena.close()


def test_put_replaces_shape_and_type_and_reuses_the_space(place: list[Path]) -> None:
    with TensorStore.create(place, capacity="4MiB", **ANY_DISK) as store:
        for round_number in range(40):
            array = numbers(100_000 + round_number, (np.float32, np.int16)[round_number % 2])
            store.put("w", array)
            store.commit()
            np.testing.assert_array_equal(store.get("w"), array)
        assert store.used_bytes <= 1 << 20


def test_removed_tensor_is_gone_and_its_space_returns_at_commit(place: list[Path]) -> None:
    with TensorStore.create(place, capacity="1MiB", **ANY_DISK) as store:
        empty = store.used_bytes
        store.put("w", numbers(1000))
        store.put("v", numbers(1000, seed=1))
        store.commit()
        store.remove("w")
        assert "w" not in store
        assert store.names() == ["v"]
        store.commit()
        store.remove("v")
        store.commit()
        assert store.used_bytes == empty
    with TensorStore.open(place, **ANY_DISK) as store:
        assert store.names() == []


def test_compaction_keeps_the_state_of_the_tensors_behind_a_removed_one(place: list[Path]) -> None:
    arrays = {f"t{i}": numbers(5000, seed=i) for i in range(6)}
    with TensorStore.create(place, capacity="4MiB", **ANY_DISK) as store:
        for name, array in arrays.items():
            store.put(name, array)
        store.commit()
        for name in ("t0", "t3"):
            store.remove(name)
            del arrays[name]
        store.put("t5", arrays["t5"] + 1)
        arrays["t5"] = arrays["t5"] + 1
        store.commit()
        assert {name: store.get(name).tolist() for name in store.names()} == {
            name: array.tolist() for name, array in arrays.items()
        }
    with TensorStore.open(place, **ANY_DISK) as store:
        for name, array in arrays.items():
            np.testing.assert_array_equal(store.get(name), array)


@pytest.mark.parametrize("elements", [300_000, 300_000 * 9])
def test_tile_larger_than_the_bounce_memory_is_written_in_pieces(place: list[Path], elements: int) -> None:
    spec = TensorSpec("w", "float32", (elements,))
    values = numbers(elements)
    with TensorStore.create(place, specs=[spec], bounce_bytes=1 << 18, **ANY_DISK) as store:
        for add in range(3):
            store.write_elements("w", 0, values + add)
            np.testing.assert_array_equal(store.get("w"), values + add)
            assert store.verify().ok
            store.commit()
    with TensorStore.open(place, **ANY_DISK) as store:
        np.testing.assert_array_equal(store.get("w"), values + 2)


def test_elements_are_read_from_anywhere(place: list[Path]) -> None:
    values = numbers(10_000)
    with TensorStore.create(
        place, specs=[TensorSpec("w", "float32", (10_000,), tile_elements=1024)], **ANY_DISK
    ) as store:
        store.write_elements("w", 0, values)
        for start, count in [(0, 10_000), (1, 1), (1023, 2), (5000, 4321), (10_000, 0), (9_999, 1)]:
            np.testing.assert_array_equal(
                store.read_elements("w", start, count), values[start : start + count]
            )
        np.testing.assert_array_equal(read(store, "w", 2048, 3000), values[2048:5048])


def test_read_only_tensor_has_one_place_and_is_written_once(place: list[Path]) -> None:
    spec = TensorSpec("w", "float32", (1 << 18,), tile_elements=1024, mutable=False)
    with TensorStore.create(place, specs=[spec], **ANY_DISK) as store:
        if len(place) == 1:
            assert store.capacity_bytes == 1 << 20
        store.write_elements("w", 0, numbers(1 << 18))
        store.write_elements("w", 0, numbers(1 << 18, seed=1))
        store.commit()
        with pytest.raises(StoreError, match=r"'w'.*mutable=False"):
            write(store, "w", 0, numbers(1024))


def test_scratch_is_written_and_read_outside_generations(place: list[Path], io: IoArguments) -> None:
    specs = [TensorSpec("w", "float32", (1024,))]
    with TensorStore.create(place, specs=specs, scratch_bytes=1 << 20, **io) as store:
        store.write_elements("w", 0, numbers(1024))
        spool = store.scratch("spool", 1 << 20)
        data = slot(numbers(1 << 17, seed=4))
        batch = store.batch()
        for piece in range(8):
            spool.write(address_of(data) + piece * 65536, 65536, piece * 65536, batch)
        batch.submit(data)
        target = aligned_buffer(data.nbytes)
        ticket = spool.read(address_of(target), data.nbytes)
        assert ticket is not None
        ticket.wait()
        np.testing.assert_array_equal(target, data)
        store.commit()
        np.testing.assert_array_equal(store.get("w"), numbers(1024))
        with pytest.raises(StoreError, match=r"no room for scratch 'more' of 16,777,216 bytes"):
            store.scratch("more", 16 << 20)
        with pytest.raises(StoreError, match="outside it or misaligned"):
            spool.write(address_of(data), 4096, 1 << 20)
        store.release_scratch("spool")
        store.scratch("more", 1 << 20)


def test_checkpoint_durability_takes_half_the_space_and_refuses_after_a_crash(place: list[Path]) -> None:
    specs = [TensorSpec("w", "float32", (1 << 20,), tile_elements=1 << 18)]
    values = numbers(1 << 20)
    assert bytes_needed(specs, 0, "step") - bytes_needed(specs, 0, "checkpoint") == 4 << 20
    store = TensorStore.create(place, specs=specs, durability="checkpoint", **ANY_DISK)
    if len(place) == 1:
        assert store.capacity_bytes == 4 << 20
    store.write_elements("w", 0, values)
    store.commit(b"one")
    assert not store.dirty
    store.close()

    store = TensorStore.open(place, **ANY_DISK)
    store.write_elements("w", 0, values + 1)
    assert store.dirty
    generation = store.commit(b"two")
    assert not store.dirty
    write(store, "w", 1, values[:262144])
    abandon(store)

    with pytest.raises(DirtyStoreError, match=r"overwritten in place .*generation 3") as caught:
        TensorStore.open(place, **ANY_DISK)
    assert (caught.value.generation, caught.value.run_state) == (generation, b"two")
    with TensorStore.open(place, read_only=True, **ANY_DISK) as store:
        assert store.dirty
        assert store.run_state == b"two"
        report = store.verify()
        assert [(fault.tensor, report.tiles) for fault in report.faults] == [("w", 4)]
        np.testing.assert_array_equal(read(store, "w", 0, 1 << 18), values[: 1 << 18] + 1)
    with TensorStore.open(place, read_only=True, check_reads=True, **ANY_DISK) as store:
        np.testing.assert_array_equal(read(store, "w", 0, 1 << 18), values[: 1 << 18] + 1)
        with pytest.raises(StoreError, match=r"'w' .* holds a mixture of two steps") as caught_read:
            read(store, "w", 1 << 18, 1 << 18)
        assert "disk returned" not in str(caught_read.value)


def test_members_may_be_given_in_any_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"m{index}" for index in range(3)]
    values = numbers(2_000_000)
    with TensorStore.create(paths, capacity="32MiB", weights=[2, 1, 3], **ANY_DISK) as store:
        store.put("w", values)
        store.commit()
    with TensorStore.open(paths[::-1], **ANY_DISK) as store:
        assert store.paths == [str(path) for path in paths]
        np.testing.assert_array_equal(store.get("w"), values)


def test_files_are_private_and_fully_reserved(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="3MiB", **ANY_DISK):
        status = (tmp_path / "memascend.store").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 3 << 20


def test_capacity_is_what_the_planner_computes(tmp_path: Path) -> None:
    specs = [
        TensorSpec("a", "float32", (5000,), tile_elements=1024),
        TensorSpec("b", "bfloat16", (100, 576), row_access=True),
        TensorSpec("c", "float32", (3,), mutable=False),
    ]
    paths = [tmp_path / "x", tmp_path / "y"]
    for durability in ("step", "checkpoint"):
        expected = bytes_needed(specs, 100_000, durability, weights=(1, 2))
        with TensorStore.create(
            paths,
            specs=specs,
            scratch_bytes=100_000,
            durability=durability,
            weights=(1, 2),
            overwrite=True,
            **ANY_DISK,
        ):
            assert sum(path.stat().st_size for path in paths) == expected


def test_inspect_and_counters_describe_the_store(place: list[Path]) -> None:
    with TensorStore.create(place, capacity="8MiB", **ANY_DISK) as store:
        start = store.counters()
        store.put("w", numbers(1 << 18))
        moved = store.counters()
        assert moved.write_bytes - start.write_bytes == 1 << 20
        store.get("w")
        assert store.counters().read_bytes - moved.read_bytes == 1 << 20
        store.commit(b"12345")
        described = store.inspect()
        assert described["generation"] == 1
        assert described["run_state_bytes"] == 5
        assert described["tensors"][0]["name"] == "w"
        assert described["tensors"][0]["written"]
        total = described["bytes_written"]
    with TensorStore.open(place, **ANY_DISK) as store:
        assert store.inspect()["bytes_written"] >= 1 << 20
        assert store.inspect()["bytes_written"] <= total + (1 << 20)


def test_wipe_removes_a_file_store_even_an_open_failed_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with TensorStore.create(path, capacity="1MiB", **ANY_DISK) as store:
        with pytest.raises(StoreError, match="in use"):
            TensorStore.wipe(path)
        store.commit()
    raw = bytearray(path.read_bytes())
    raw[100:200] = bytes(100)
    path.write_bytes(raw)
    assert TensorStore.wipe(path) == [str(path)]
    assert not path.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": 5}, r"name must be a str, got 5 \(int\)"),
        ({"name": b"w"}, r"name must be a str, got b'w' \(bytes\)"),
        ({"dtype": np.float32}, r"tensor 'w': dtype must be a name"),
        ({"dtype": ["float32"]}, r"tensor 'w': dtype must be a name"),
        ({"shape": 5}, r"tensor 'w': shape must be one whole number per axis, got 5"),
        ({"shape": (2.5,)}, r"tensor 'w': shape \(2.5,\): axis 0 must be a whole number, got 2.5 \(float\)"),
        (
            {"shape": (0, 2**70)},
            r"tensor 'w': shape .*axis 1 must be from .* got 1,180,591,620,717,411,303,424",
        ),
        ({"shape": (0, 2**40, 2**40)}, r"tensor 'w': shape .* is more than"),
        ({"tile_elements": 2**70}, r"tensor 'w': tile_elements must be from"),
        ({"tile_elements": 2**63}, r"tensor 'w': tile_elements .* got 9,223,372,036,854,775,808"),
        (
            {"tile_elements": 1024.0},
            r"tensor 'w': tile_elements must be a whole number, got 1024.0 \(float\)",
        ),
        ({"global_shape": (2**70,)}, r"tensor 'w': global_shape .*axis 0 must be from"),
        ({"global_shape": (2**70,), "start": (2**65,)}, r"tensor 'w': global_shape"),
        ({"global_shape": (2**62,), "start": (2**65,)}, r"tensor 'w': start .*axis 0 must be from"),
        ({"shape": (1, 1), "global_shape": (2**40, 2**40)}, r"tensor 'w': the global shape .* is more than"),
        ({"start": "0"}, r"tensor 'w': start must be one whole number per axis, got '0'"),
        ({"mutable": "no"}, r"tensor 'w': mutable must be True or False, got 'no'"),
        ({"row_access": 2}, r"tensor 'w': row_access must be True or False, got 2"),
    ],
)
def test_spec_that_no_catalog_can_hold_is_refused_and_blocks_nothing(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    spec = TensorSpec(**{"name": "w", "dtype": "float32", "shape": (1024,), **fields})  # type: ignore[arg-type]
    with TensorStore.create(tmp_path, capacity="1MiB", **ANY_DISK) as store:
        with pytest.raises(StoreError, match=message):
            store.declare(spec)
        assert (store.names(), store.used_bytes) == ([], 0)
        assert store.commit() == 1
    with pytest.raises(StoreError, match=message):
        TensorStore.create(tmp_path / "other", specs=[spec], **ANY_DISK)
    assert not (tmp_path / "other").exists()


def test_spec_takes_numbers_of_any_integer_type(tmp_path: Path) -> None:
    spec = TensorSpec(
        "w",
        "float32",
        (np.int64(2), np.uint16(2048)),
        tile_elements=np.int32(1024),  # type: ignore[arg-type]
        global_shape=[np.int16(4), 2048],  # type: ignore[arg-type]
        start=np.array([2, 0]),  # type: ignore[arg-type]
    )
    with TensorStore.create(tmp_path, specs=[spec], **ANY_DISK) as store:
        store.write_elements("w", 0, numbers(4096))
        store.commit()
    with TensorStore.open(tmp_path, **ANY_DISK) as store:
        assert store.spec("w") == TensorSpec(
            "w", "float32", (2, 2048), tile_elements=1024, global_shape=(4, 2048), start=(2, 0)
        )


def test_tensor_that_the_catalog_has_no_room_for_is_refused_before_anything_changes(tmp_path: Path) -> None:
    value = np.arange(3)
    with TensorStore.create(tmp_path, capacity="4MiB", catalog_bytes=4096, **ANY_DISK) as store:
        put = 0
        with pytest.raises(
            StoreError, match=r"no room to declare tensor 't\d+' .* room for 4,096; .*catalog-bytes"
        ):
            for put in range(200):
                store.put(f"t{put}", value)
        assert 20 < put == len(store.names())
        # The same sums as the encoding has: what was accepted can be committed.
        assert store.commit() == 1
        used = store.used_bytes
        for refused in (
            lambda: store.declare(TensorSpec("x" * 4000, "int8", (1,))),
            lambda: store.declare(TensorSpec("many", "int8", (1 << 20,), tile_elements=4096)),
            lambda: store.declare(TensorSpec("units", "int8", (1024, 1024), row_access=True)),
            lambda: store.put("t0", np.zeros((1,) * 16, np.int8)),
        ):
            with pytest.raises(StoreError, match="no room to declare tensor"):
                refused()
            assert (len(store.names()), store.used_bytes) == (put, used)
        np.testing.assert_array_equal(store.get("t0"), value)
        store.remove("t1")
        store.put("u1", value)
        store.put("u1", value.astype(np.int8))
        assert store.commit() == 2
    with TensorStore.open(tmp_path, **ANY_DISK) as store:
        with pytest.raises(StoreError, match="no room to declare tensor 'moremore"):
            store.put("more" * 10, value)
        assert len(store.names()) == put
        assert store.verify().ok
        with pytest.raises(
            StoreError, match=r"cannot commit to store .* 5,000 bytes of run state .* room for 4,096"
        ):
            store.commit(bytes(5000))


def test_specs_that_the_given_catalog_has_no_room_for_make_no_store(tmp_path: Path) -> None:
    specs = [TensorSpec(f"t{index}", "int8", (1,)) for index in range(100)]
    with pytest.raises(
        StoreError, match=r"cannot create a store for these specs: the catalog of 100 tensors .*4,096"
    ):
        TensorStore.create(tmp_path / "s", specs=specs, catalog_bytes=4096, **ANY_DISK)
    assert not (tmp_path / "s").exists()


def test_store_full_of_the_smallest_tensors_has_room_for_their_catalog(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="32MiB", **ANY_DISK) as store:
        for index in range(store.capacity_bytes // (2 * 4096)):
            store.declare(TensorSpec(f"layers.{index}.self_attn.q_proj.weight", "int8", (1,)))
        assert store.used_bytes == store.capacity_bytes
        assert store.commit() == 1


def test_put_without_room_leaves_the_tensor_that_it_would_replace(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="1MiB", **ANY_DISK) as store:
        store.put("w", np.arange(1000))
        with pytest.raises(StoreError, match="no room for tensor 'w'"):
            store.put("w", np.arange(1_000_000))
        np.testing.assert_array_equal(store.get("w"), np.arange(1000))


def test_arguments_that_mean_nothing_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    spec = TensorSpec("w", "float32", (16, 64), row_access=True)
    locked = np.zeros((1, 64), np.float32)
    locked.flags.writeable = False
    memory = aligned_buffer(8192)
    with TensorStore.create(tmp_path, specs=[spec], capacity="1MiB", **ANY_DISK) as store:
        store.write_elements("w", 0, numbers(1024))
        store.commit(b"before")
        used, generation = store.used_bytes, store.generation
        for call, message in [
            (lambda: store.scratch("n", -1), "bytes of scratch 'n' must be from 0 to .*, got -1"),
            (lambda: store.scratch("n", 4096.5), "bytes of scratch 'n' must be a whole number, got 4096.5"),
            (lambda: store.scratch("n", 1 << 70), "bytes of scratch 'n' must be from"),
            (lambda: store.scratch(1, 4096), r"name of scratch must be a str, got 1 \(int\)"),
            (lambda: store.read_elements("w", 0.5, 3), "first element to read of tensor 'w' .* got 0.5"),
            (lambda: store.read_elements("w", 0, 3.0), "number of elements to read of tensor 'w' .* got 3.0"),
            (lambda: store.write_elements("w", 0.0, numbers(1024)), "first element to write of tensor 'w'"),
            (lambda: store.tile_span("w", 0.5), "the tile of tensor 'w' must be a whole number, got 0.5"),
            (lambda: store.batch().write_tile("w", 0.5, address_of(memory)), "tile to write of tensor 'w'"),
            (lambda: store.batch().read("w", address_of(memory), 0.5), "first element to read of tensor 'w'"),
            (lambda: store.slot_bytes(1.5, "float32"), "n_elements must be a whole number, got 1.5"),
            (lambda: store.read_rows("w", np.array([1]), locked), "'w' into out: .* got a read-only one"),
            (lambda: store.read_rows("w", np.array([1]), [0.0]), r"'w' into out: .* got \[0.0\] \(list\)"),
            (lambda: store.commit(5), r"run_state must be bytes, got 5 \(int\)"),
            (lambda: store.commit({}), r"run_state must be bytes, got {} \(dict\)"),
            (lambda: store.commit("text"), r"run_state must be bytes, got 'text' \(str\)"),
            (lambda: store.declare(1), r"declared with a TensorSpec, got 1 \(int\)"),
        ]:
            with pytest.raises(StoreError, match=message):
                call()
            assert (store.used_bytes, store.generation, store.run_state) == (used, generation, b"before")
        scratch = store.scratch("n", np.int64(4096))
        for call in (
            lambda: scratch.write(address_of(memory), 0.5),
            lambda: scratch.read(address_of(memory), 1, 0.5),
        ):
            with pytest.raises(StoreError, match=r"scratch 'n' must be a whole number, got 0\.5"):
                call()
        assert store.commit(memoryview(b"after")) == 2
        assert store.run_state == b"after"
    for call in (store.batch, lambda: store.release_scratch("n"), lambda: store.scratch("m", 1)):
        with pytest.raises(StoreError, match="is closed; open it again"):
            call()
    for paths in (None, "", [""], [None], 5, b"bytes", "nul\0", [tmp_path, 1]):
        with pytest.raises(StoreError, match=r"paths? must be .*got "):
            TensorStore.open(paths, **ANY_DISK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 1.5}, r"capacity must be a whole number, got 1.5 \(float\)"),
        ({"capacity": 0}, "capacity must be from 1 to .*, got 0"),
        ({"capacity": -1}, "capacity must be from 1 to .*, got -1"),
        ({"capacity": "0GiB"}, "capacity must be from 1 to .*, got 0"),
        ({"capacity": "-1GiB"}, "capacity: expected a size"),
        ({"capacity": 1 << 70}, "capacity must be from 1"),
        ({"weights": [1.5]}, r"weights \[1.5\]: that of member 0 must be a whole number, got 1.5 \(float\)"),
        ({"weights": 1}, r"weights must be one whole number per path, got 1 \(int\)"),
        ({"speeds": 1}, r"speeds must be one number per path, got 1 \(int\)"),
        ({"speeds": ["1"]}, "speeds must be 1 to 16 positive numbers"),
        ({"specs": [1]}, r"declared with a TensorSpec, got 1 \(int\)"),
        ({"specs": 1}, r"specs must be a sequence of TensorSpec, got 1 \(int\)"),
        ({"scratch_bytes": 4096.5}, "scratch_bytes must be a whole number, got 4096.5"),
        ({"scratch_bytes": -1}, "scratch_bytes must be from 0 to .*, got -1"),
        ({"catalog_bytes": 4096.0}, "catalog_bytes must be a whole number, got 4096.0"),
        ({"catalog_bytes": -1}, "catalog_bytes must be from 1"),
        ({"block_bytes": 4096.0}, "block_bytes must be a whole number, got 4096.0"),
        ({"block_bytes": 0, "specs": [TensorSpec("w", "int8", (1,))]}, "block_bytes must be a power of two"),
        ({"queue_depth": 1.5}, "queue_depth must be a whole number, got 1.5"),
        ({"bounce_bytes": "1MiB"}, "bounce_bytes must be a whole number, got '1MiB'"),
    ],
)
def test_arguments_of_create_are_checked_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        TensorStore.create(tmp_path / "s", **{"capacity": "1MiB", **ANY_DISK, **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
