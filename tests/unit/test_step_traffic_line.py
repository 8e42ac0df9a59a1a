# SPDX-License-Identifier: Apache-2.0
"""What a step's line counts ends where its own update begins, whatever that has done by the end of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memascend_jax.data.packing import Microbatch
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.loss_scale import ScalePolicy
from memascend_jax.training.loop import Trainer
from memascend_jax.training.step import TrainStep


class Disk:
    """An updater and a model whose forward, backward and update each move bytes when they are carried out."""

    def __init__(self) -> None:
        self.moved = 0
        self.early = False

    def io_bytes(self) -> tuple[int, int]:
        return self.moved, self.moved

    def begin_early(self, scale: object) -> None:
        self.early = True

    def begin(self, *_: object) -> None:
        self.moved += 100

    def loss_and_gradients(
        self, micro_batches: object, rows: object, before_backward: Any, **_: object
    ) -> Any:
        self.moved += 1
        before_backward()
        self.moved += 10 + 100 * self.early
        return 1.0, SimpleNamespace(global_norm=lambda: 1.0, why_nonfinite=lambda: None)


@pytest.mark.parametrize(("in_backward", "counted"), [(False, 11), (True, 1)])
def test_a_line_ends_where_the_update_of_its_step_begins(in_backward: bool, counted: int) -> None:
    disk: Any = Disk()
    disk.layout = SimpleNamespace(config=SimpleNamespace(vocab_size=8), tensors=())
    disk.reach = SimpleNamespace(embedding=False)
    step = TrainStep(disk, disk, lambda step: 1e-3, None, policy=ScalePolicy(), in_backward=in_backward)
    ids = np.zeros((1, 4), np.int32)
    batch = Microbatch(ids, ids, ids.astype(np.float32), ids, ids)
    result = step(1, [batch], [batch])
    assert result.io_bytes == (counted, counted)


def test_what_is_done_between_steps_is_in_no_line() -> None:
    disk: Any = Disk()
    lines: list[dict[str, Any]] = []
    disk.finish_update = lambda: disk.begin()
    disk.finish_commit = lambda: None
    sink: Any = SimpleNamespace(write=lines.append)
    trainer = Trainer(
        disk, disk, disk, StepClock(), disk, sink, planned_host_bytes=0, pinned_bytes=0, warn=print
    )
    with trainer.between_steps():
        disk.moved += 5000
    trainer._drain(1)
    # The update that had to be waited for is the step's.
    (line,) = lines
    assert (line["ssd_read_bytes"], line["ssd_write_bytes"]) == (100, 100)
