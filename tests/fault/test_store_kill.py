# SPDX-License-Identifier: Apache-2.0
"""A process that commits in a loop is killed by SIGKILL at random instants; nothing it committed is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commit_forever import TENSORS, contents
from places import BlockDevices
from stores import backend_arguments

from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.fault


class Victim:
    """The forking process of ``commit_forever``, one child at a time."""

    def __init__(self) -> None:
        script = Path(__file__).parents[1] / "support" / "commit_forever.py"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )

    def kill_after(self, delay_s: float, paths: list[Path], backend: str) -> int:
        """Starts a child, kills it ``delay_s`` after it has opened the store; returns its last committed generation."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("|".join(map(str, paths)) + f"\t{backend}\n")
        self._process.stdin.flush()
        child = None
        generation = -1
        for line in self._process.stdout:
            kind, _, value = line.strip().partition(" ")
            if kind == "gone":
                break
            if kind == "child":
                child = int(value)
            else:
                generation = int(value)
            if child is not None and generation >= 0 and delay_s >= 0:
                time.sleep(delay_s)
                os.kill(child, signal.SIGKILL)
                delay_s = -1.0
        return generation

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("kills", [15, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["file", "2 files", "device", "device and file"])
def test_killed_process_loses_nothing_that_it_committed(
    tmp_path: Path, backend: str, kills: int, kind: str, block_devices: BlockDevices
) -> None:
    arguments = backend_arguments(backend)
    two_files = [tmp_path / "a", tmp_path / "b"]
    paths = two_files if kind == "2 files" else block_devices.paths(kind, tmp_path)
    specs = [TensorSpec(f"t{index}", "float32", (40_000,), tile_elements=2048) for index in range(TENSORS)]
    with TensorStore.create(paths, specs=specs, **arguments) as store:
        for index in range(TENSORS):
            store.write_elements(f"t{index}", 0, contents(1, index))
        store.commit(b"1")
    rng = np.random.default_rng(kills)
    victim = Victim()
    latest = 1
    try:
        for _ in range(kills):
            committed = victim.kill_after(float(rng.uniform(0, 0.05)), paths, backend)
            with TensorStore.open(paths, **arguments) as store:
                assert store.generation in (committed, committed + 1)
                assert store.generation >= latest
                assert store.run_state == str(store.generation).encode()
                check_contents(store)
                latest = store.generation
    finally:
        victim.close()
    # Most were killed with generations of their own behind them.
    assert latest > kills // 3


def check_contents(store: TensorStore) -> None:
    for index in range(TENSORS):
        np.testing.assert_array_equal(store.get(f"t{index}"), contents(store.generation, index))
