# SPDX-License-Identifier: Apache-2.0
"""Leases: exact slots, waiting instead of failing, and no slot lent again under somebody who still reads it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from memascend_jax.errors import RunError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool

PAGE = 4096


class Work:
    """Pending work that ends when the test says so."""

    def __init__(self, failure: OSError | None = None) -> None:
        self.ended = False
        self.failure = failure

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def arena() -> PinnedArena:
    return PinnedArena(8 * PAGE, pin="none")


@pytest.fixture
def pool(arena: PinnedArena) -> SlotPool:
    return SlotPool(arena, {"layer": SizeClass(2 * PAGE, 2), "tile": SizeClass(100, 1)})


def test_all_slots_are_taken_from_the_arena_at_the_start(arena: PinnedArena, pool: SlotPool) -> None:
    assert arena.in_use_bytes == 5 * PAGE
    assert pool.classes["tile"] == SizeClass(100, 1)
    assert pool.free_count("layer") == 2
    pool.close()
    assert arena.in_use_bytes == 0


def test_an_arena_too_small_is_refused_and_left_as_it_was(arena: PinnedArena) -> None:
    with pytest.raises(MemoryError, match="slot 'b'"):
        SlotPool(arena, {"a": SizeClass(PAGE, 2), "b": SizeClass(7 * PAGE, 1)})
    assert arena.in_use_bytes == 0


def test_a_lease_is_a_writable_view_of_exactly_its_slot(pool: SlotPool) -> None:
    with pool.lease("tile", label="mine") as lease:
        assert lease.nbytes == 100
        view = lease.view(np.float32, (5, 5))
        view[:] = 2
        assert lease.view(np.uint8, (100,)).view(np.float32).sum() == 50
        with pytest.raises(IndexError, match="leaves slot"):
            lease.view(np.float32, (5, 5), offset=4)
    with pytest.raises(RuntimeError, match="lease 'mine' is released"):
        lease.view(np.uint8, (1,))
    lease.release()
    assert pool.free_count("tile") == 1


def test_an_unknown_class_is_a_key_error(pool: SlotPool) -> None:
    with pytest.raises(KeyError):
        pool.lease("head")


def test_a_wait_that_cannot_end_lists_the_holders_at_once(pool: SlotPool) -> None:
    held = [pool.lease("layer", label=f"layer.{i}") for i in range(2)]
    began = time.monotonic()
    with pytest.raises(RunError, match=r"would never end.*2 leased \('layer\.[01]' for 0\.. s, 'layer"):
        pool.lease("layer")
    assert time.monotonic() - began < 1
    held[0].release()
    pool.lease("layer").release()


def test_an_empty_class_makes_the_caller_wait_for_another_thread(pool: SlotPool) -> None:
    taken = pool.lease("tile")
    taken.hand_over()
    timer = threading.Timer(0.05, taken.release)
    timer.start()
    began = time.monotonic()
    pool.lease("tile").release()
    assert 0.01 < time.monotonic() - began < 5
    timer.join()


def test_a_wait_is_bounded_by_its_timeout(pool: SlotPool) -> None:
    taken = pool.lease("tile")
    taken.hand_over()
    with pytest.raises(RunError, match=r"no slot came back within 0.05 s: class 'tile' has 1 slot"):
        pool.lease("tile", timeout_s=0.05)


def test_a_slot_with_readers_is_not_lent_before_they_leave(pool: SlotPool) -> None:
    lease = pool.lease("tile")
    address = lease.address
    reader = np.from_dlpack(lease.export("uint8", (100,)))
    assert lease.readers == 1
    lease.release()
    assert pool.free_count("tile") == 0
    with pytest.raises(RunError, match=r"1 on the way back \(one with 1 reader"):
        pool.lease("tile", timeout_s=0.02)
    threading.Timer(0.05, lambda box=[reader]: box.clear()).start()
    del reader
    again = pool.lease("tile", timeout_s=10.0)
    assert again.address == address


def test_a_slot_with_pending_work_is_not_lent_before_it_ends(pool: SlotPool) -> None:
    work = Work()
    lease = pool.lease("tile")
    lease.defer(work)
    lease.release()
    assert pool.free_count("tile") == 0
    threading.Timer(0.05, lambda: setattr(work, "ended", True)).start()
    pool.lease("tile", timeout_s=10.0).release()


def test_the_failure_of_pending_work_is_passed_on_once_and_the_slot_comes_back(pool: SlotPool) -> None:
    work = Work(OSError(5, "lost"))
    lease = pool.lease("tile")
    lease.defer(work)
    lease.release()
    work.ended = True
    with pytest.raises(OSError, match="lost"):
        pool.lease("tile")
    pool.lease("tile").release()


def test_close_refuses_while_leased_and_waits_for_readers(arena: PinnedArena, pool: SlotPool) -> None:
    lease = pool.lease("tile", label="last")
    with pytest.raises(RunError, match=r"cannot close the pool.*'last'"):
        pool.close()
    box = [np.from_dlpack(lease.export("uint8", (100,)))]
    lease.release()
    with pytest.raises(RunError, match=r"one with 1 reader"):
        pool.close(timeout_s=0.01)
    threading.Timer(0.05, box.clear).start()
    pool.close()
    assert arena.in_use_bytes == 0


def test_many_threads_never_hold_one_slot_at_once(pool: SlotPool) -> None:
    wrong: list[int] = []

    def use(mark: int) -> None:
        for _ in range(100):
            with pool.lease("layer") as lease:
                view = lease.view(np.uint8, (2 * PAGE,))
                view[:] = mark
                time.sleep(0)
                if (view != mark).any():
                    wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.free_count("layer") == 2


def test_a_lease_that_is_deferred_again_and_again_forgets_what_has_ended(pool: SlotPool) -> None:
    lease = pool.lease("tile")
    going = Work()
    for work in (going, *(Work() for _ in range(100))):
        lease.defer(work)
        work.ended = work is not going
    lease.defer(Work())
    assert len(lease._pending) == 2 and lease._pending[0] is going
    going.ended = True
