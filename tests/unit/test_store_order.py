# SPDX-License-Identifier: Apache-2.0
"""The order between batches in flight, on an engine that does nothing before it is waited for, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from simulated_disk import DoneTicket, SimulatedDisk, SimulatedEngine
from stores import slot

from memascend_jax.storage import tile_io
from memascend_jax.storage.engine import address_of, aligned_buffer
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore, Ticket


class LazyEngine(SimulatedEngine):
    """Keeps requests until somebody waits: what the store does not order by waiting happens at the wrong time."""

    def __init__(self, disk: SimulatedDisk, fds: Sequence[int]) -> None:
        super().__init__(disk, fds)
        self.lazy = False

    def submit_read(self, segments: np.ndarray, keepalive: object = None, urgent: bool = False) -> DoneTicket:
        self.urgent_reads += urgent
        run = super().submit_read
        return LazyTicket(lambda: run(segments)) if self.lazy else run(segments)

    def submit_write(self, segments: np.ndarray, keepalive: object = None) -> DoneTicket:
        run = super().submit_write
        return LazyTicket(lambda: run(segments)) if self.lazy else run(segments)


class LazyTicket(DoneTicket):
    """Runs its request when waited for."""

    def __init__(self, run: object) -> None:
        super().__init__(None)
        self._run = run

    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run()  # type: ignore[operator]


class Bench:
    """A store with one tensor of four tiles on a lazy engine."""

    def __init__(self, folder: Path, durability: str) -> None:
        disk = SimulatedDisk()
        self.engines: list[LazyEngine] = []

        def make(fds: Sequence[int]) -> LazyEngine:
            self.engines.append(LazyEngine(disk, fds))
            return self.engines[-1]

        self.store = TensorStore.create(
            folder,
            specs=[TensorSpec("w", "float32", (4096,), tile_elements=1024)],
            scratch_bytes=8192,
            durability=durability,  # type: ignore[arg-type]
            direct_io="off",
            make_engine=make,
        )
        self.store.write_elements("w", 0, np.zeros(4096, np.float32))
        self.store.commit()
        self.engines[0].lazy = True
        self.kept: list[object] = []

    def write(self, tile: int, value: int) -> Ticket:
        memory = slot(np.full(1024, value, np.float32))
        self.kept.append(memory)
        batch = self.store.batch()
        batch.write_tile("w", tile, address_of(memory))
        return batch.submit(memory)

    def read(self) -> tuple[Ticket, np.ndarray]:
        target = aligned_buffer(16384)
        batch = self.store.batch()
        batch.read("w", address_of(target))
        return batch.submit(target), target.view(np.float32)[::1024]


@pytest.fixture(params=["step", "checkpoint"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, request.param)


def test_read_sees_the_write_submitted_before_it(bench: Bench) -> None:
    bench.write(1, 5)
    ticket, values = bench.read()
    ticket.wait()
    assert values.tolist() == [0, 5, 0, 0]


def test_read_does_not_see_a_write_submitted_after_it(bench: Bench) -> None:
    bench.write(1, 5)
    ticket, values = bench.read()
    bench.write(1, 6).wait()
    ticket.wait()
    assert values.tolist() == [0, 5, 0, 0]


def test_none_of_several_reads_in_flight_sees_a_write_submitted_after_them(bench: Bench) -> None:
    bench.write(1, 5)
    reads = [bench.read() for _ in range(3)]
    # Waiting for the last of them says nothing about the others.
    reads[2][0].wait()
    bench.write(1, 6).wait()
    for ticket, values in reads:
        ticket.wait()
        assert values.tolist() == [0, 5, 0, 0]


def test_write_to_the_other_place_does_not_wait_for_reads(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "step")
    reading, values = bench.read()
    writing = bench.write(1, 6)
    assert not reading.done()
    writing.wait()
    reading.wait()
    assert values.tolist() == [0, 0, 0, 0]


def test_large_batch_is_written_in_pieces_with_the_right_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_io, "_FIRST_PIECE_BYTES", 4096)
    monkeypatch.setattr(tile_io, "_PIECE_BYTES", 8192)
    bench = Bench(tmp_path, "step")
    memory = slot(np.repeat(np.arange(4, dtype=np.float32), 1024))
    batch = bench.store.batch()
    for tile in (3, 0, 1, 2):
        batch.write_tile("w", tile, address_of(memory) + tile * 4096)
    ticket = batch.submit(memory)
    # One tile, so that the disk soon has something to do, then two, then the one that is left.
    assert len(ticket.engine_tickets) == 3
    assert ticket.nbytes == 16384
    assert bench.store.get("w")[::1024].tolist() == [0, 1, 2, 3]
    assert bench.store.verify().ok


def test_checksums_take_all_threads_only_while_the_disk_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_io, "_FIRST_PIECE_BYTES", 4096)
    monkeypatch.setattr(tile_io, "_PIECE_BYTES", 4096)
    alone: list[bool] = []
    real = tile_io.crc32c_many

    def recorded(addresses: np.ndarray, nbytes: np.ndarray, one_thread: bool = False) -> np.ndarray:
        alone.append(one_thread)
        return real(addresses, nbytes, one_thread)

    monkeypatch.setattr(tile_io, "crc32c_many", recorded)
    bench = Bench(tmp_path, "step")
    memory = slot(np.zeros(4 * 1024, np.float32))
    alone.clear()
    batch = bench.store.batch()
    for tile in (0, 1):
        batch.write_tile("w", tile, address_of(memory) + tile * 4096)
    first = batch.submit(memory)
    # Nothing ends in this engine until it is waited for.
    batch.write_tile("w", 2, address_of(memory) + 2 * 4096)
    second = batch.submit(memory)
    assert alone == [False, True, True]
    first.wait()
    second.wait()
    bench.write(3, 1)
    assert alone == [False, True, True, False]


def test_urgency_reaches_the_engine_with_the_reads_it_is_for(bench: Bench) -> None:
    target = aligned_buffer(16384)
    for urgent in (False, True):
        batch = bench.store.batch()
        batch.read("w", address_of(target))
        batch.submit(target, urgent=urgent).wait()
    assert bench.engines[0].urgent_reads == 1


def test_last_of_two_writes_stays(bench: Bench) -> None:
    first = bench.write(2, 7)
    bench.write(2, 8).wait()
    first.wait()
    ticket, values = bench.read()
    ticket.wait()
    assert values.tolist() == [0, 0, 8, 0]


def test_batches_of_different_tiles_do_not_wait_for_each_other(bench: Bench) -> None:
    first = bench.write(0, 1)
    second = bench.write(3, 2)
    assert not first.done()
    assert not second.done()
    second.wait()
    assert not first.done()
    bench.store.commit()
    assert first.done()
    ticket, values = bench.read()
    ticket.wait()
    assert values.tolist() == [1, 0, 0, 2]


def test_rows_are_ordered_like_reads(bench: Bench) -> None:
    bench.write(1, 5)
    out = np.empty(3, np.float32)
    bench.store.read_rows("w", np.array([1023, 1024, 2047]), out)
    assert out.tolist() == [0, 5, 5]


def test_scratch_requests_that_overlap_are_ordered(bench: Bench) -> None:
    scratch = bench.store.scratch("x", 8192)

    def write(value: int, offset: int) -> Ticket:
        memory = slot(np.full(1024, value, np.float32))
        bench.kept.append(memory)
        ticket = scratch.write(address_of(memory), 4096, offset)
        assert ticket is not None
        return ticket

    first = write(1, 0)
    other = write(2, 4096)
    assert not first.done()
    target = aligned_buffer(8192)
    reading = scratch.read(address_of(target), 8192)
    assert reading is not None
    assert first.done()
    assert other.done()
    write(3, 0).wait()
    reading.wait()
    assert target.view(np.float32)[::1024].tolist() == [1, 2]
    again = write(4, 0)
    write(5, 0).wait()
    again.wait()
    reading = scratch.read(address_of(target), 8192)
    assert reading is not None
    reading.wait()
    assert target.view(np.float32)[::1024].tolist() == [5, 2]
