# SPDX-License-Identifier: Apache-2.0
"""The store against a dictionary, over random histories: puts, tile writes, reads, commits, crashes, reopenings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from places import PLACES, BlockDevices
from stores import abandon, backend_arguments, read, write

from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.property

NAMES = st.sampled_from(["a", "b", "c", "d"])
TILE = 1024
#: Steps per example times examples: at least 2,000 steps per run and engine.
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def values(elements: int, seed: int) -> np.ndarray:
    return (np.arange(elements, dtype=np.float32) * 7 + seed) % 1009


def files(count: str, folder: Path) -> list[Path]:
    return [folder / f"m{index}" for index in range(int(count))]


class StoreMachine(RuleBasedStateMachine):
    """``model`` is what the store must hold now, ``committed`` what it must hold after a reopening."""

    io: ClassVar[IoArguments] = {}
    #: Returns the members of a place, the files among them in a folder.
    paths_of: ClassVar[Callable[[str, Path], list[Path]]]
    places: ClassVar[list[str]] = []

    @initialize(data=st.data(), weights=st.sampled_from([(1, 1, 1), (2, 1, 3)]))
    def create(self, data: st.DataObject, weights: tuple[int, ...]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.paths = type(self).paths_of(data.draw(st.sampled_from(self.places)), self.folder)
        weights = weights[: len(self.paths)]
        self.store = TensorStore.create(
            self.paths,
            capacity="3MiB",
            catalog_bytes=1 << 15,
            bounce_bytes=1 << 17,
            weights=weights,
            **self.io,
        )
        self.model: dict[str, np.ndarray] = {}
        self.committed: dict[str, np.ndarray] = {}
        self.run_state = b""
        self.generation = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(name=NAMES, elements=st.integers(0, 12 * TILE), seed=st.integers(0, 1000))
    def put(self, name: str, elements: int, seed: int) -> None:
        # Replaced tensors hold their space until the commit: keep room for that.
        if self.store.used_bytes > self.store.capacity_bytes - (1 << 18):
            self.commit(seed)
        self.model[name] = values(elements, seed)
        self.store.put(name, self.model[name])

    @rule(name=NAMES, tiles=st.integers(1, 9), tail=st.integers(1, TILE), seed=st.integers(0, 1000))
    def declare_and_fill(self, name: str, tiles: int, tail: int, seed: int) -> None:
        if name in self.model or self.store.used_bytes > self.store.capacity_bytes - (1 << 18):
            return
        elements = (tiles - 1) * TILE + tail
        self.store.declare(
            TensorSpec(name, "float32", (elements,), tile_elements=TILE, row_access=bool(seed % 2))
        )
        self.model[name] = values(elements, seed)
        self.store.write_elements(name, 0, self.model[name])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 1000))
    def write_tiles(self, data: st.DataObject, seed: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        tiles = self.store.tiles(name)
        for tile in data.draw(st.sets(st.integers(0, tiles - 1), min_size=1, max_size=3)):
            start, count = self.store.tile_span(name, tile)
            self.model[name] = self.model[name].copy()
            self.model[name][start : start + count] = values(count, seed + tile)
            write(self.store, name, tile, self.model[name][start : start + count])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read_some(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        expected = self.model[name]
        np.testing.assert_array_equal(read(self.store, name), expected)
        start = data.draw(st.integers(0, len(expected)))
        count = data.draw(st.integers(0, len(expected) - start))
        found = self.store.read_elements(name, start, count)
        np.testing.assert_array_equal(found, expected[start : start + count])
        rows = np.array(data.draw(st.lists(st.integers(0, max(len(expected) - 1, 0)), max_size=20)), np.int64)
        if len(expected):
            out = np.empty(len(rows), np.float32)
            self.store.read_rows(name, rows, out)
            np.testing.assert_array_equal(out, expected[rows])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store.remove(name)
        del self.model[name]

    @rule(seed=st.integers(0, 1000))
    def commit(self, seed: int) -> None:
        self.run_state = str(seed).encode() * (seed % 5)
        self.generation += 1
        assert self.store.commit(self.run_state) == self.generation
        self.committed = dict(self.model)

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.store.close()
        else:
            self.store._io.settle_all()
            abandon(self.store)
        self.store = TensorStore.open(self.paths, bounce_bytes=1 << 17, **self.io)
        self.model = dict(self.committed)
        assert (self.store.generation, self.store.run_state) == (self.generation, self.run_state)

    @rule()
    def verify(self) -> None:
        assert self.store.verify().ok

    @invariant()
    def holds_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert sorted(self.store.names()) == sorted(self.model)
        for name, expected in self.model.items():
            np.testing.assert_array_equal(self.store.get(name), expected)


@pytest.mark.parametrize("kind", ["files", "block devices"])
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_store_behaves_like_a_dictionary(backend: str, kind: str, block_devices: BlockDevices) -> None:
    if kind == "files":
        places, paths_of = ["1", "2", "3"], files
    else:
        block_devices.blank("device")
        places, paths_of = [name for name in PLACES if name != "file"], block_devices.paths
    members = {"io": backend_arguments(backend), "places": places, "paths_of": staticmethod(paths_of)}
    machine = type("Machine", (StoreMachine,), members)
    machine.TestCase.settings = SETTINGS
    machine.TestCase().runTest()
