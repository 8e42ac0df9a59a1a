# SPDX-License-Identifier: Apache-2.0
"""One training step: forward and backward, the global norm, and the beginning of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memascend_jax.data.packing import Microbatch
from memascend_jax.errors import NonfiniteError
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe import trace
from memascend_jax.optim.adamw import UpdateScale
from memascend_jax.optim.loss_scale import MOST_SKIPPED_IN_A_ROW, ScalePolicy, ScaleState, first_scale
from memascend_jax.optim.noise_scale import NoiseEstimate, estimate_noise
from memascend_jax.training.batch_rows import BatchRows, collect_rows
from memascend_jax.training.forward_backward import StreamedModel
from memascend_jax.training.gradients import StepGradients
from memascend_jax.training.update import Updater, clip_scale

_REMEDY = "Lower optimizer.learning_rate, or look at the batch that this step trained on."


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports of its mathematics.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the trained tokens, before the update; without the loss scale.
        grad_norm: global norm of the rounded gradients before clipping, without the loss scale; inf if it was skipped.
        tokens: trained tokens.
        io_bytes: read from and written to SSD before the update of this step began, in the backward or after it:
            what an update beside the step has done by another moment is chance.
        loss_scale: factor that the loss of this step had.
        scaling: the loss scale and the counters after this step.
        skipped: why nothing was updated, or None.
        stage_norms: of the gradient of each stage that has one, by name, if asked for; as ``grad_norm``.
        noise: estimates for the gradient noise scale, the embedding left out, if asked for and not skipped.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    io_bytes: tuple[int, int]
    loss_scale: float
    scaling: ScaleState
    skipped: str | None = None
    stage_norms: Mapping[str, float] | None = None
    noise: NoiseEstimate | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step finds out besides: the norm of each stage's gradient, and how micro-batches scatter."""

    stage_norms: bool = False
    noise: bool = False


class TrainStep:
    """Runs steps; everything it needs is given once.

    Args:
        clip_norm: largest global norm of the gradient, or None.
        policy: what the loss is multiplied by, and whether steps that are not finite are skipped.
        scaling: the scale and counters that an earlier run left.
        in_backward: layers are updated in the backward: nothing may need the whole gradient first.
        asked: what is found out besides.
    """

    def __init__(
        self,
        model: StreamedModel,
        updater: Updater,
        schedule: Callable[[int], float],
        clip_norm: float | None,
        *,
        policy: ScalePolicy,
        scaling: ScaleState | None = None,
        in_backward: bool = False,
        asked: Asked = Asked(),
    ) -> None:
        self._asked = asked
        self._stages = {tensor.name: tensor.stage for tensor in model.layout.tensors}
        self._in_backward = in_backward
        self._model = model
        self._updater = updater
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._policy = policy
        self.scaling = first_scale(policy, scaling)

    def __call__(
        self, step: int, micro_batches: Sequence[Microbatch], following: Sequence[Microbatch]
    ) -> StepResult:
        """Trains step ``step`` (from 1) on ``micro_batches``; the caller commits.

        The update has begun when this returns; whatever needs its results waits for it. A step that is skipped has
        changed nothing but ``scaling``.

        Args:
            following: what the next step will train on: its embedding rows are updated first.

        Raises:
            NonfiniteError: the loss or a gradient is inf or nan, and such steps are not skipped, or too many in a row
                were; nothing was updated.
        """
        trace.phase("forward")
        # Rows of a frozen embedding are never updated ahead.
        ahead = following if self._model.reach.embedding else ()
        rows = collect_rows(micro_batches, self._model.layout.config.vocab_size, ahead)
        learning_rate = self._schedule(step - 1)
        loss_scale = self.scaling.value

        moved: tuple[int, int] | None = None

        def before_backward() -> None:
            nonlocal moved
            if self._in_backward:
                self._updater.begin_early(self._update_scale(step, learning_rate, 1.0))
                moved = self._updater.io_bytes()

        loss, gradients = self._model.loss_and_gradients(
            micro_batches, rows, before_backward, loss_scale=loss_scale, micro_norms=self._asked.noise
        )
        moved = self._updater.io_bytes() if moved is None else moved
        why = _why_nonfinite(loss, gradients) if self._policy.skips else None
        if why is None:
            norm = self._begin_update(step, learning_rate, loss, gradients, rows)
            self.scaling = self.scaling.after_good_step(self._policy)
        else:
            norm, why = math.inf, self._skip(step, why)
        tokens = [float(micro_batch.weights.sum()) for micro_batch in micro_batches]
        return StepResult(
            step,
            loss,
            learning_rate,
            norm,
            sum(map(int, tokens)),
            moved,
            loss_scale,
            self.scaling,
            skipped=why,
            stage_norms=self._stage_norms(gradients, loss_scale) if self._asked.stage_norms else None,
            noise=_noise(gradients, tokens, loss_scale) if self._asked.noise and why is None else None,
        )

    def _stage_norms(self, gradients: StepGradients, loss_scale: float) -> dict[str, float]:
        return {stage: norm / loss_scale for stage, norm in gradients.stage_norms(self._stages).items()}

    def _update_scale(self, step: int, learning_rate: float, grad_scale: float) -> UpdateScale:
        return UpdateScale(step - self.scaling.skipped_steps, learning_rate, grad_scale)

    def _begin_update(
        self, step: int, learning_rate: float, loss: float, gradients: StepGradients, rows: BatchRows
    ) -> float:
        """Returns the norm."""
        if not math.isfinite(loss):
            raise NonfiniteError(
                f"the loss of step {step} is {loss}; nothing of this step was applied. {_REMEDY}"
            )
        loss_scale = self.scaling.value
        norm = gradients.global_norm() / loss_scale
        grad_scale = clip_scale(norm, self._clip_norm) / loss_scale
        self._updater.begin(gradients, self._update_scale(step, learning_rate, grad_scale), rows.ahead)
        return norm

    def _skip(self, step: int, why: str) -> str:
        """Leaves the state as it is and returns the sentence that says so."""
        self._updater.skip()
        before, self.scaling = self.scaling, self.scaling.after_skipped_step(self._policy)
        if self.scaling.skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
            raise NonfiniteError(
                f"{why}; {MOST_SKIPPED_IN_A_ROW} steps before step {step} were skipped for the same reason, so it is "
                f"not the batch; nothing of this step was applied. {_REMEDY}"
            )
        scale = ""
        if before.value != 1.0 or self._policy.dynamic:
            scale = f" at loss scale {before.value:,g}"
            if self.scaling.value != before.value:
                scale += f", which is {self.scaling.value:,g} from now on"
        return f"step {step} is skipped: {why}{scale} (skipped so far: {self.scaling.skipped_steps:,})"


def _noise(gradients: StepGradients, tokens: Sequence[float], loss_scale: float) -> NoiseEstimate | None:
    """Returns the estimates without the embedding, whose gradient is summed over micro-batches row by row."""
    squares = [square / loss_scale**2 for square in gradients.micro_squares]
    return estimate_noise(gradients.square_without(EMBED_NAME) / loss_scale**2, squares, tokens)


def _why_nonfinite(loss: float, gradients: StepGradients) -> str | None:
    """Returns what of a step is inf or nan, or None."""
    why = gradients.why_nonfinite()
    if math.isfinite(loss):
        return why
    return f"the loss is {loss}" + (f", {why}" if why else "")
