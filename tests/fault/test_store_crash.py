# SPDX-License-Identifier: Apache-2.0
"""Crashes at every I/O boundary: after reopening the store is in exactly one generation, or says that it is not.

The oracle is a list of the states that were committed: contents of all tensors and the run state. See
``simulated_disk`` for what a crash may leave behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from simulated_disk import CrashError, SimulatedDisk
from stores import abandon

from memascend_jax.errors import StoreError
from memascend_jax.storage.formatting import is_member
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.store_errors import DirtyStoreError
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.fault

#: Tensor contents and run state of one generation.
State = tuple[dict[str, list[float]], bytes]


class Machine:
    """A store on a simulated disk, the states committed so far, and the one that a running commit would make."""

    def __init__(self, folder: Path, members: int, durability: str, block_bytes: int) -> None:
        self.disk = SimulatedDisk()
        self.paths = [folder / f"m{index}" for index in range(members)]
        self.io: IoArguments = {"direct_io": "off", "make_engine": self.disk.engine, "bounce_bytes": 1 << 17}
        specs = [
            TensorSpec("a", "float32", (3 * block_bytes // 4,), tile_elements=block_bytes // 4),
            TensorSpec("b", "float32", (5,)),
        ]
        store = TensorStore.create(
            self.paths,
            specs=specs,
            capacity=64 * block_bytes,
            block_bytes=block_bytes,
            durability=durability,  # type: ignore[arg-type]
            catalog_bytes=4096,
            **self.io,
        )
        self.store: TensorStore = store
        store.put("a", np.zeros(3 * block_bytes // 4, np.float32))
        store.put("b", np.zeros(5, np.float32))
        store.commit(b"start")
        self.base = self.state_of(store)
        self.images = {path: path.read_bytes() for path in self.paths}
        abandon(store)

    def reset(self) -> None:
        """Goes back to the state after construction, with the store open and nothing in flight."""
        for path, image in self.images.items():
            path.write_bytes(image)
        self.disk.forget()
        self.store = self.open()
        self.disk.boundaries = 0

    def open(self) -> TensorStore:
        return TensorStore.open(self.paths, **self.io)

    @staticmethod
    def state_of(store: TensorStore) -> State:
        return {name: store.get(name).tolist() for name in store.names()}, store.run_state


def one_tile_and_commit(store: TensorStore, seen: list[State]) -> None:
    """The smallest step: one tile of one tensor, and a catalog of six sectors."""
    run_state = bytes(range(250)) * 8
    store.write_elements("b", 0, np.full(5, 1, np.float32))
    contents = {name: store.get(name).tolist() for name in store.names()}
    seen.append((contents, run_state))
    store.commit(run_state)
    seen.append(seen[-1])


def several_steps(store: TensorStore, seen: list[State]) -> None:
    """Partial updates, a new tensor, a replaced one, a removed one, over three commits."""
    elements = store.spec("a").shape[0]
    for step in range(1, 4):
        start, count = store.tile_span("a", step % 3)
        store.write_elements("a", start, np.full(count, step, np.float32))
        if step == 1:
            store.put("c", np.arange(300, dtype=np.int16))
        if step == 2:
            store.put("b", np.arange(elements, dtype=np.float32))
        if step == 3:
            # The new tensor would fit where the old one was, which the last commit still needs.
            store.remove("c")
            store.put("d", np.full(300, 7, np.int16))
        contents = {name: store.get(name).tolist() for name in store.names()}
        seen.append((contents, bytes([step])))
        store.commit(bytes([step]))
        seen.append(seen[-1])


def crash_everywhere(
    machine: Machine,
    work: Callable[[TensorStore, list[State]], None],
    states_per_crash: int,
    may_refuse: bool = False,
) -> tuple[int, int]:
    """Runs ``work`` once per I/O boundary, crashes there, and checks what each possible disk holds.

    Returns:
        (crash states checked, of them refused as dirty).
    """
    rng = np.random.default_rng(17)
    boundary = checked = refused = 0
    while True:
        machine.reset()
        machine.disk.crash_at = boundary
        seen = [machine.base, machine.base]
        try:
            work(machine.store, seen)
        except CrashError:
            pass
        else:
            abandon(machine.store)
            return checked, refused
        abandon(machine.store)
        machine.disk.crash_at = None
        # ``seen`` holds a state twice once its commit has returned: then nothing older may come back.
        allowed = [seen[-1]] if seen[-1] is seen[-2] else [seen[-2], seen[-1]]
        for persisted in machine.disk.crash_states(states_per_crash, rng):
            machine.disk.restart(persisted)
            disk, machine.disk = machine.disk, SimulatedDisk()
            machine.io["make_engine"] = machine.disk.engine
            try:
                check_reopened(machine, allowed)
            except DirtyStoreError:
                if not may_refuse:
                    raise
                refused += 1
            finally:
                machine.disk = disk
                machine.io["make_engine"] = disk.engine
            checked += 1
        boundary += 1


def check_reopened(machine: Machine, allowed: list[State]) -> None:
    """The store opens in one of the ``allowed`` states, every checksum right, and works again."""
    store = machine.open()
    try:
        assert machine.state_of(store) in allowed
        assert store.verify().ok
        store.write_elements("b", 0, np.full(store.spec("b").shape, 9, np.float32))
        store.commit(b"again")
        expected = machine.state_of(store)
        store.close()
        store = machine.open()
        assert machine.state_of(store) == expected
    finally:
        abandon(store)


@pytest.mark.parametrize("members", [1, 2])
def test_every_subset_of_a_small_commit_gives_old_or_new(tmp_path: Path, members: int) -> None:
    machine = Machine(tmp_path, members, "step", 512)
    checked, _ = crash_everywhere(machine, one_tile_and_commit, states_per_crash=256 // members**2)
    assert checked > 60


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_crash_in_several_steps_gives_the_generation_before_or_after(
    tmp_path: Path, members: int, block_bytes: int
) -> None:
    machine = Machine(tmp_path, members, "step", block_bytes)
    checked, _ = crash_everywhere(machine, several_steps, states_per_crash=16 // members)
    assert checked > 50


def test_checkpoint_durability_never_shows_mixed_data(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, "checkpoint", 512)
    checked, refused = crash_everywhere(machine, several_steps, states_per_crash=16, may_refuse=True)
    assert 0 < refused < checked


def test_crash_while_opening_after_a_crash_loses_nothing(tmp_path: Path) -> None:
    """Recovery itself writes: it too may be cut anywhere, any number of times."""
    machine = Machine(tmp_path, 2, "step", 512)
    rng = np.random.default_rng(5)
    machine.reset()
    seen = [machine.base, machine.base]
    several_steps(machine.store, seen)
    writes = machine.disk.boundaries
    abandon(machine.store)
    for _ in range(40):
        machine.reset()
        seen = [machine.base, machine.base]
        machine.disk.crash_at = int(rng.integers(writes))
        with pytest.raises(CrashError):
            several_steps(machine.store, seen)
        abandon(machine.store)
        allowed = [seen[-1]] if seen[-1] is seen[-2] else [seen[-2], seen[-1]]
        for _ in range(3):
            states = list(machine.disk.crash_states(8, rng))
            machine.disk.restart(states[rng.integers(len(states))])
            machine.disk.forget()
            machine.disk.crash_at = int(rng.integers(1, 8))
            try:
                reopened = machine.open()
            except CrashError:
                continue
            found = machine.state_of(reopened)
            assert found in allowed
            allowed = [found]
            abandon(reopened)
        machine.disk.restart([])
        machine.disk.forget()
        check_reopened(machine, allowed)


def test_interrupted_create_is_named_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "s"
    boundary = unfinished = 0
    rng = np.random.default_rng(1)
    while True:
        disk = SimulatedDisk()
        disk.crash_at = boundary
        path.write_bytes(b"")
        io: IoArguments = {"direct_io": "off", "make_engine": disk.engine}
        try:
            TensorStore.create(path, capacity=65536, catalog_bytes=4096, **io).close()
        except CrashError:
            pass
        else:
            break
        for persisted in disk.crash_states(8, rng):
            disk.restart(persisted)
            io["make_engine"] = SimulatedDisk().engine
            finished = is_member(str(path))
            try:
                store = TensorStore.create(path, capacity=65536, catalog_bytes=4096, **io)
            except StoreError:
                # It was finished: then it is whole, and empty.
                assert finished
                store = TensorStore.open(path, **io)
                assert (store.names(), store.generation) == ([], 0)
            else:
                assert not finished
                unfinished += 1
            with store:
                store.put("w", np.arange(3))
                store.commit()
                assert store.get("w").tolist() == [0, 1, 2]
        boundary += 1
    assert boundary > 5
    assert unfinished > 10
