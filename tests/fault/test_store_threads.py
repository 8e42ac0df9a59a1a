# SPDX-License-Identifier: Apache-2.0
"""Readers, writers and commits from several threads: every read sees whole tiles, in an order that was written."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from stores import backend_arguments

from memascend_jax.storage.engine import address_of, aligned_buffer
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.fault

TILE, TILES, ROUNDS = 16_384, 24, 16


class Threads:
    """Runs functions in threads and raises what any of them raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()

    def start(self, work: object) -> None:
        def guarded() -> None:
            try:
                work()  # type: ignore[operator]
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

        self._threads.append(threading.Thread(target=guarded))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_concurrent_reads_see_whole_tiles_that_never_go_back(tmp_path: Path, backend: str) -> None:
    spec = TensorSpec("w", "float32", (TILES * TILE,), tile_elements=TILE)
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore.create(paths, specs=[spec], **backend_arguments(backend)) as store:
        store.write_elements("w", 0, np.zeros(TILES * TILE, np.float32))
        store.commit()
        threads = Threads()
        written = threading.Event()

        def write() -> None:
            memory = [aligned_buffer(TILE * 4) for _ in range(TILES)]
            tickets = []
            for version in range(1, ROUNDS + 1):
                for tile in range(version % 2, TILES, 2):
                    if len(tickets) >= TILES // 2:
                        tickets.pop(0).wait()
                    memory[tile].view(np.float32)[:] = version
                    batch = store.batch()
                    batch.write_tile("w", tile, address_of(memory[tile]))
                    tickets.append(batch.submit(memory[tile]))
            for ticket in tickets:
                ticket.wait()
            written.set()

        def read() -> None:
            target = aligned_buffer(TILES * TILE * 4)
            last = np.zeros(TILES, np.float32)
            while not written.is_set() and not threads.stop.is_set():
                batch = store.batch()
                batch.read("w", address_of(target))
                batch.submit(target).wait()
                tiles = target.view(np.float32).reshape(TILES, TILE)
                assert (tiles == tiles[:, :1]).all(), "a tile is torn"
                assert (tiles[:, 0] >= last).all(), "a tile went back"
                last = tiles[:, 0].copy()

        def commit() -> None:
            while not written.is_set() and not threads.stop.is_set():
                store.commit(b"state")
                threads.stop.wait(0.01)

        for work in (write, read, read, commit):
            threads.start(work)
        threads.join()
        store.commit(b"end")
        assert store.verify().ok
    with TensorStore.open(paths, **backend_arguments(backend)) as store:
        tiles = store.get("w").reshape(TILES, TILE)[:, 0]
        assert tiles[ROUNDS % 2 :: 2].tolist() == [ROUNDS] * (TILES // 2)
        assert tiles[1 - ROUNDS % 2 :: 2].tolist() == [ROUNDS - 1] * (TILES // 2)


def test_copies_and_rows_from_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    values = {f"t{index}": np.arange(30_000, dtype=np.float32) + index for index in range(6)}
    arguments = backend_arguments("io_uring")
    with TensorStore.create(tmp_path, capacity="16MiB", bounce_bytes=1 << 17, **arguments) as store:
        threads = Threads()
        for name, array in values.items():

            def use(name: str = name, array: np.ndarray = array) -> None:
                rng = np.random.default_rng(len(name))
                for turn in range(15):
                    store.put(name, array + turn)
                    np.testing.assert_array_equal(store.get(name), array + turn)
                    rows = rng.integers(0, len(array), 200)
                    out = np.empty(200, np.float32)
                    store.read_rows(name, rows, out)
                    np.testing.assert_array_equal(out, (array + turn)[rows])
                    if turn % 5 == 4:
                        store.commit()
                        assert store.verify().ok

            threads.start(use)
        threads.join()
