# SPDX-License-Identifier: Apache-2.0
"""One training step: forward and backward, the global norm, and the beginning of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memascend_jax.data.packing import Microbatch
from memascend_jax.errors import NonfiniteError
from memascend_jax.observe import trace
from memascend_jax.optim.adamw import UpdateScale
from memascend_jax.training.batch_rows import collect_rows
from memascend_jax.training.forward_backward import StreamedModel
from memascend_jax.training.update import Updater, clip_scale


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports of its mathematics.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the trained tokens, before the update.
        grad_norm: global norm of the rounded gradients before clipping.
        tokens: trained tokens.
        io_bytes: read from and written to SSD before the update of this step began, of which a reading ahead would
            otherwise count here or there by chance.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    io_bytes: tuple[int, int]


class TrainStep:
    """Runs steps; everything it needs is given once."""

    def __init__(
        self,
        model: StreamedModel,
        updater: Updater,
        schedule: Callable[[int], float],
        clip_norm: float | None,
        *,
        in_backward: bool = False,
    ) -> None:
        self._in_backward = in_backward
        self._model = model
        self._updater = updater
        self._schedule = schedule
        self._clip_norm = clip_norm

    def __call__(
        self, step: int, micro_batches: Sequence[Microbatch], following: Sequence[Microbatch]
    ) -> StepResult:
        """Trains step ``step`` (from 1) on ``micro_batches``; the caller commits.

        The update has begun when this returns; whatever needs its results waits for it.

        Args:
            following: what the next step will train on: its embedding rows are updated first.

        Raises:
            NonfiniteError: the loss or a gradient is inf or nan; nothing was updated.
        """
        trace.phase("forward")
        rows = collect_rows(micro_batches, self._model.layout.config.vocab_size, following)
        learning_rate = self._schedule(step - 1)

        def before_backward() -> None:
            if self._in_backward:
                self._updater.begin_early(UpdateScale(step, learning_rate, 1.0))

        loss, gradients = self._model.loss_and_gradients(micro_batches, rows, before_backward)
        if not math.isfinite(loss):
            raise NonfiniteError(
                f"the loss of step {step} is {loss}; nothing of this step was applied. "
                "Lower optimizer.learning_rate, or look at the batch that this step trained on."
            )
        norm = gradients.global_norm()
        scale = UpdateScale(step, learning_rate, clip_scale(norm, self._clip_norm))
        moved = self._updater.io_bytes()
        self._updater.begin(gradients, scale, rows.ahead)
        tokens = sum(int(micro_batch.weights.sum()) for micro_batch in micro_batches)
        return StepResult(step, loss, learning_rate, norm, tokens, moved)
