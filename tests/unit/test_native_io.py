# SPDX-License-Identifier: Apache-2.0
"""The I/O engine as Python sees it: errors, keepalives, the GIL. The engine itself is tested in native/tests."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memascend_jax._native import _core
from memascend_jax.memory.meter import process_io_bytes

MIB = 1 << 20


class Keepalive:
    """Something a weak reference can follow."""


@pytest.fixture
def member(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "member"
    path.write_bytes(bytes(4 * MIB))
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, member: int) -> Iterator[_core.IoEngine]:
    try:
        made = _core.IoEngine([member], backend=request.param)
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    yield made
    made.close()


@pytest.fixture
def slot() -> _core.Slot:
    return _core.PinnedArena(4 * MIB, pin="none").allocate(4 * MIB)


def _segment(slot: _core.Slot, offset: int = 0, nbytes: int = MIB) -> np.ndarray:
    return np.array([[0, offset, slot.address, nbytes]], np.int64)


def test_bytes_go_out_and_come_back(engine: _core.IoEngine, slot: _core.Slot) -> None:
    view = slot.view(0, MIB)
    view[:] = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    expected = view.copy()
    ticket = engine.submit_write(_segment(slot))
    assert ticket.nbytes == MIB
    ticket.wait()
    engine.flush()
    view[:] = 0
    ticket = engine.submit_read(_segment(slot))
    assert ticket.wait_for(10.0)
    assert ticket.done()
    ticket.wait()
    np.testing.assert_array_equal(view, expected)


def test_failures_are_os_errors_with_number_text_and_path(
    engine: _core.IoEngine, slot: _core.Slot, member: int
) -> None:
    ticket = engine.submit_read(_segment(slot, offset=4 * MIB))
    for _ in range(2):
        with pytest.raises(OSError, match="the file ends after 0 of them") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(Path(f"/proc/self/fd/{member}").readlink())


def test_a_keepalive_lives_as_long_as_its_batch_although_the_ticket_is_dropped(
    engine: _core.IoEngine, slot: _core.Slot
) -> None:
    kept = Keepalive()
    alive = weakref.ref(kept)
    ticket = engine.submit_read(_segment(slot, nbytes=4 * MIB), kept)
    del kept
    if not ticket.done():
        assert alive() is not None
    ticket.wait()
    assert alive() is None
    kept = Keepalive()
    alive = weakref.ref(kept)
    engine.submit_read(_segment(slot), kept)
    del kept
    engine.close()
    assert alive() is None


def test_waiting_lets_other_threads_run(engine: _core.IoEngine, slot: _core.Slot) -> None:
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(5):
        engine.submit_read(_segment(slot, nbytes=4 * MIB)).wait()
    stop.set()
    thread.join()
    assert ticks > 0


def test_wrong_segments_are_value_errors(engine: _core.IoEngine, slot: _core.Slot) -> None:
    with pytest.raises(ValueError, match=r"shape \[n, 4\]"):
        engine.submit_read(np.zeros((1, 3), np.int64))
    with pytest.raises(ValueError, match="negative"):
        engine.submit_read(_segment(slot, offset=-4096))
    with pytest.raises(ValueError, match="member 3 of 1"):
        engine.submit_read(np.array([[3, 0, slot.address, 4096]]))


def test_counters_agree_with_the_kernel(engine: _core.IoEngine, slot: _core.Slot, member: int) -> None:
    before = process_io_bytes()
    for offset in range(0, 4 * MIB, MIB):
        engine.submit_write(_segment(slot, offset)).wait()
    engine.flush()
    written = process_io_bytes().write_bytes - before.write_bytes
    counters = engine.counters()
    assert counters["write_bytes"] == 4 * MIB
    assert counters["write_requests"] == 4
    if written:  # a tmpfs is not counted by the kernel
        assert abs(written - 4 * MIB) <= 0.02 * 4 * MIB


def test_statistics_tell_what_each_member_did(member: int, slot: _core.Slot) -> None:
    engine = _core.IoEngine([member, member], queue_depth=4, request_bytes=65536)
    engine.submit_write(np.array([[1, 0, slot.address, MIB]])).wait()
    engine.submit_read(np.array([[0, 0, slot.address, 65536]]), None, urgent=True).wait()
    engine.close()
    first, second = engine.statistics()
    assert (first["read_bytes"], first["read_requests"], first["urgent_requests"]) == (65536, 1, 1)
    assert (second["write_bytes"], second["write_requests"], second["urgent_requests"]) == (MIB, 16, 0)
    assert sum(first["read_latency"]) == 1
    assert sum(first["write_latency"]) == 0
    assert sum(second["write_latency"]) == 16
    assert len(second["write_latency"]) == 32
    assert 0 < second["queue_depth"] <= second["queue_depth_max"] == 4
    assert second["busy_seconds"] > 0
    assert second["request_bytes"] == 65536
    assert first["path"] == str(Path(f"/proc/self/fd/{member}").readlink())


def test_close_may_cancel_what_has_not_begun(member: int, slot: _core.Slot) -> None:
    engine = _core.IoEngine([member], queue_depth=1, request_bytes=4096)
    kept = [Keepalive() for _ in range(20)]
    alive = [weakref.ref(one) for one in kept]
    tickets = [engine.submit_write(_segment(slot), one) for one in kept]
    del kept
    engine.close(cancel=True)
    assert all(ticket.done() for ticket in tickets)
    with pytest.raises(OSError, match="the engine was closed before the request began") as caught:
        tickets[-1].wait()
    assert caught.value.errno == errno.ECANCELED
    assert engine.statistics()[0]["cancelled_bytes"] > 0
    assert all(one() is None for one in alive)


def test_a_closed_engine_refuses(engine: _core.IoEngine, slot: _core.Slot) -> None:
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit_read(_segment(slot))
