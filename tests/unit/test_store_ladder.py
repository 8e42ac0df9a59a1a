# SPDX-License-Identifier: Apache-2.0
"""Each rung of the I/O ladder that was not reached is said once, with its reason, and shown by inspect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from simulated_disk import SimulatedDisk, SimulatedEngine
from stores import ANY_DISK

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.tensor_store import TensorStore


class LowRungEngine(SimulatedEngine):
    """An engine on a machine that forbids things."""

    backend = "threads"
    backend_reason = "io_uring_setup: Operation not permitted [EPERM]; the container forbids it"
    uses_registered_buffers = False
    registration_reason = "Cannot allocate memory [ENOMEM]; raise the memlock limit"


class UnregisteredEngine(LowRungEngine):
    backend = "io_uring"
    backend_reason = ""


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (LowRungEngine, ("io_uring", "threads", LowRungEngine.backend_reason)),
        (UnregisteredEngine, ("registered buffers", "plain buffers", LowRungEngine.registration_reason)),
    ],
)
def test_rung_is_said_once_with_its_reason(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    engine: type[SimulatedEngine],
    expected: tuple[str, str, str],
) -> None:
    disk = SimulatedDisk()

    def make(fds: Sequence[int]) -> SimulatedEngine:
        return engine(disk, fds)

    arena = PinnedArena(16 << 20)
    io: IoArguments = {"direct_io": "off", "make_engine": make, "arena": arena}
    TensorStore.create(tmp_path, capacity="1MiB", **io).close()
    with TensorStore.open(tmp_path, **io) as store:
        found = [rung for rung in store.fallbacks if rung.wanted == expected[0]]
        assert [(rung.wanted, rung.used, rung.reason) for rung in found] == [expected]
        assert store.inspect()["fallbacks"] == [rung.to_json() for rung in store.fallbacks]
    assert [record.message for record in caplog.records].count(f"store '{store.paths[0]}' {found[0]}") == 1
    arena.close()


def test_highest_rungs_say_nothing(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="1MiB", **ANY_DISK) as store:
        if store.direct and store.io_backend == "io_uring":
            assert store.fallbacks == []
