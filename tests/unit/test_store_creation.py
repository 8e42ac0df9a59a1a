# SPDX-License-Identifier: Apache-2.0
"""How large a new store is and how its members share it: weights by speed, whole devices, discard."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import ANY_DISK, loop_device

from memascend_jax.errors import StoreError
from memascend_jax.storage import filesystem
from memascend_jax.storage.capacity import plan_whole_devices
from memascend_jax.storage.layout import MAX_WEIGHT
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.storage.weights import split_slowdown, weights_from_speeds


def test_weights_are_the_smallest_that_let_members_finish_together() -> None:
    assert weights_from_speeds([3.0]) == (1,)
    assert weights_from_speeds([3.0, 3.05]) == (1, 1)
    assert weights_from_speeds([7000, 3500]) == (2, 1)
    assert weights_from_speeds([3, 1, 2]) == (3, 1, 2)
    assert weights_from_speeds([1, 1000]) == (1, MAX_WEIGHT)


@given(st.lists(st.floats(0.5, 7.5), min_size=1, max_size=16))
def test_no_member_keeps_the_others_waiting_long(speeds: list[float]) -> None:
    weights = weights_from_speeds(speeds)
    assert all(1 <= weight <= MAX_WEIGHT for weight in weights)
    assert 1 <= split_slowdown(weights, speeds) * (1 + 1e-12) <= 1.06


@pytest.mark.parametrize("speeds", [[], [0.0], [1, -1], [float("nan")], [float("inf")], [1.0] * 17])
def test_speeds_that_make_no_sense_are_refused(speeds: list[float]) -> None:
    with pytest.raises(StoreError, match="1 to 16 positive numbers"):
        weights_from_speeds(speeds)


def test_speeds_and_measured_weights_are_kept_in_the_store(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore.create(paths, capacity="4MiB", speeds=[2.0, 1.0], **ANY_DISK) as store:
        assert [member["weight"] for member in store.inspect()["members"]] == [2, 1]
    # Room for both places of the tensor whatever the weights round the capacity to.
    with TensorStore.create(paths, capacity="16MiB", weights="measure", overwrite=True, **ANY_DISK) as store:
        values = np.arange(300_000)
        store.put("w", values)
        np.testing.assert_array_equal(store.get("w"), values)
    # The sample files had no names.
    assert sorted(tmp_path.iterdir()) == paths
    for arguments, message in [
        ({"weights": [1, 1], "speeds": [1, 1]}, "give one of them"),
        ({"weights": "guess"}, "'measure', got 'guess'"),
        ({"speeds": [1.0]}, r"1 speeds for 2 members, got \[1.0\]; give one per path"),
        ({"weights": [1]}, r"1 weights for 2 members, got \[1\]; give one weight per path"),
        ({"weights": [1, 0]}, r"weights \[1, 0\]: .* from 1 to 64, member 1 was given 0; give each path"),
        ({"weights": [65, 1]}, r"weights \[65, 1\]: .* member 0 was given 65; give each path"),
    ]:
        with pytest.raises(StoreError, match=message):
            TensorStore.create([tmp_path / "c", tmp_path / "d"], capacity=1, **arguments, **ANY_DISK)
    assert sorted(tmp_path.iterdir()) == paths


def test_measuring_a_device_changes_nothing_when_the_store_is_refused(tmp_path: Path) -> None:
    images = [tmp_path / "a", tmp_path / "b"]
    with loop_device(images[0], 8 << 20) as one, loop_device(images[1], 8 << 20) as two:
        for device in (one, two):
            with open(device, "r+b") as raw:
                raw.seek(3 << 20)
                raw.write(b"in the middle" * 100_000)
                raw.flush()
                os.fsync(raw.fileno())  # The device stays open elsewhere, so closing it writes nothing back.
        before = [image.read_bytes() for image in images]
        with pytest.raises(StoreError, match="device is too small"):
            TensorStore.create([one, two], capacity="64MiB", weights="measure", erase_foreign_data=True)
        assert [image.read_bytes() for image in images] == before


@pytest.mark.parametrize("weights", [(1,), (1, 1), (1, 2)])
def test_store_without_a_capacity_fills_its_devices(tmp_path: Path, weights: tuple[int, ...]) -> None:
    sizes = [24 << 20, 48 << 20][: len(weights)]
    with loop_device(tmp_path / "a", sizes[0]) as one, loop_device(tmp_path / "b", 48 << 20) as two:
        paths = [one, two][: len(weights)]
        with TensorStore.create(paths, weights=weights) as store:
            members = store.inspect()["members"]
            left = [size - member["bytes"] for size, member in zip(sizes, members, strict=True)]
            assert 0 <= min(left) < 2 * (1 << 20)
            assert store.capacity_bytes > 0.8 * sum(weights) * min(
                size / weight for size, weight in zip(sizes, weights, strict=True)
            )
        # With tensors to hold, it is as large as they need.
        spec = TensorSpec("w", "float32", (1000,))
        with TensorStore.create(paths, specs=[spec], weights=weights, overwrite=True) as store:
            assert store.capacity_bytes <= 4 << 20


def test_devices_without_room_are_refused_with_the_numbers() -> None:
    with pytest.raises(StoreError, match="a device of 1,048,576 bytes has no room for a store"):
        plan_whole_devices([1 << 20, 1 << 30], block_bytes=4096, weights=(1, 1), catalog_bytes=None)


def test_files_need_a_capacity(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a new store needs a capacity"):
        TensorStore.create(tmp_path / "a", **ANY_DISK)
    named = rf"cannot create a store at '{tmp_path}/a': in a file a new store needs a capacity .*--capacity"
    with loop_device(tmp_path / "image", 16 << 20) as device, pytest.raises(StoreError, match=named):
        TensorStore.create([device, tmp_path / "a"], **ANY_DISK)
    assert not (tmp_path / "a").exists()


def test_discard_frees_what_was_on_a_device(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with loop_device(image, 32 << 20) as device:
        fill(device)
        taken = image.stat().st_blocks
        TensorStore.create(device, erase_foreign_data=True, discard=False).close()
        assert image.stat().st_blocks >= taken
        with TensorStore.create(device, overwrite=True) as store:
            if image.stat().st_blocks >= taken:
                pytest.skip("the file system under the loop device cannot discard")
            assert image.stat().st_blocks * 512 < 2 << 20
            store.put("w", np.arange(1 << 20))
            store.commit()
        TensorStore.wipe(device)
        assert image.stat().st_blocks * 512 < 1 << 20


def fill(device: str) -> None:
    with open(device, "r+b", buffering=0) as raw:
        raw.write(np.random.default_rng(0).bytes(32 << 20))
        os.fsync(raw.fileno())


def test_wiped_file_keeps_no_data_under_another_name(tmp_path: Path) -> None:
    path, other = tmp_path / "s", tmp_path / "other name"
    with TensorStore.create(path, capacity="1MiB", **ANY_DISK) as store:
        store.put("w", np.full(1000, 7))
        store.commit()
    other.hardlink_to(path)
    with other.open("rb") as file:
        if not filesystem.punch(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT), 4096):
            pytest.skip("this file system cannot punch holes")
        assert file.read(8) == b"MEMASCND"
    TensorStore.wipe(path)
    assert not any(other.read_bytes())


def test_replaced_file_holds_nothing_of_the_old_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with TensorStore.create(path, capacity="1MiB", **ANY_DISK) as store:
        store.put("w", np.full(50_000, 7))
        store.commit()
    TensorStore.create(path, capacity="2MiB", overwrite=True, **ANY_DISK).close()
    assert np.full(1000, 7).tobytes() not in path.read_bytes()
    assert path.stat().st_blocks * 512 >= 2 << 20
