# SPDX-License-Identifier: Apache-2.0
"""The main job on a disk that loses power: of the writes since the last flush any part persists, torn at 512 bytes.

The machine is simulated under the store: from the cut on all I/O fails, and a restart leaves what the disk kept.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import check_same, outcome
from simulated_disk import SimulatedDisk, SimulatedEngine

from memascend_jax.config import load_config
from memascend_jax.errors import StoreError
from memascend_jax.recipes import finetune
from memascend_jax.storage import options

pytestmark = [pytest.mark.fault, pytest.mark.integration]

STEPS = 6
MODES = {
    "exact": (),
    "in the backward": ("optimizer.clip_norm=null",),
}


def go(folder: Path, disk: SimulatedDisk, *settings: str) -> int:
    common = [f"run.dir={folder}", "offload.direct_io=off", f"train.steps={STEPS}", "train.eval_every=4"]

    def make(fds: Sequence[int], **_: Any) -> SimulatedEngine:
        return disk.engine(fds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "native_engine", make)
        return finetune.run(load_config(["tiny_random"], [*common, *settings]))


def cut_at(disk: SimulatedDisk, boundary: int) -> Callable[[str, str, int], int]:
    """Lets everything fail once ``boundary`` writes and flushes have been done."""
    return lambda kind, path, offset: errno.EIO if disk.boundaries >= boundary else 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_run_whose_machine_loses_power_goes_on_from_a_whole_step(
    tmp_path: Path, mode: str, cuts: int
) -> None:
    settings, disk = MODES[mode], SimulatedDisk()
    assert go(tmp_path / "whole", disk, *settings) == 0
    expected = outcome(tmp_path / "whole")
    # What one step writes is about a tenth of this: most cuts are some steps after a start.
    most = disk.boundaries // 2
    rng = np.random.default_rng(cuts)
    done = number = 0
    while done < cuts:
        folder = tmp_path / f"cut{number}"
        number += 1
        while done < cuts:
            disk.forget()
            disk.refuse = cut_at(disk, int(rng.integers(1, most)))
            try:
                assert go(folder, disk, *settings) == 0
                break
            except StoreError as error:
                assert "Input/output error" in str(error)
            done += 1
            states = list(disk.crash_states(8, rng))
            disk.restart(states[int(rng.integers(len(states)))])
        disk.forget()
        disk.refuse = lambda kind, path, offset: 0
        assert go(folder, disk, *settings) == 0
        check_same(folder, expected)
    print(f"{mode}: {done} cuts in {number} runs")
