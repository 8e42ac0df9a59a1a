# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, metrics, commits, evaluations, and stopping on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from memascend_jax.data.packing import Microbatch, PackedExamples
from memascend_jax.data.sequences import Position, TrainingSequences, batches_at
from memascend_jax.errors import MemascendError, NonfiniteError, StoppedError
from memascend_jax.memory.meter import Meter
from memascend_jax.observe import trace
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.training.forward_backward import StreamedModel
from memascend_jax.training.gradient_facts import noise_facts, norm_facts
from memascend_jax.training.placement import Placement
from memascend_jax.training.run_state import RunState
from memascend_jax.training.step import StepResult, TrainStep
from memascend_jax.training.stop import StopRequest

Line = dict[str, Any]


class MetricsSink(Protocol):
    """Takes one line per step and makes it durable."""

    def write(self, line: Line) -> int:
        """Appends and syncs ``line``; returns the file's length in bytes afterwards."""


@dataclass(frozen=True, slots=True)
class StepData:
    """Which micro-batches a step trains on.

    Attributes:
        done_steps: steps that an earlier run has done.
        read: sequences that it read in them.
    """

    examples: TrainingSequences
    micro_batches: int
    micro_batch_size: int
    done_steps: int = 0
    read: int = 0

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.micro_batches * self.micro_batch_size

    def of_step(self, step: int) -> list[Microbatch]:
        """Returns the micro-batches of ``step``, counted from 1 and not before the first that is left to do."""
        return batches_at(self.examples, self._read_before(step), self.micro_batches, self.micro_batch_size)

    def position_after(self, step: int) -> Position:
        """Returns what the data needs, besides the number of sequences read, to go on after ``step``."""
        return self.examples.position(self._read_before(step + 1))

    def _read_before(self, step: int) -> int:
        return self.read + (step - 1 - self.done_steps) * self.sequences


class Trainer:
    """Runs steps from a committed state and commits each one.

    Args:
        warn: told of each step that was skipped, and why.
    """

    def __init__(
        self,
        model: StreamedModel,
        train_step: TrainStep,
        placement: Placement,
        clock: StepClock,
        meter: Meter,
        metrics: MetricsSink,
        *,
        planned_host_bytes: int,
        pinned_bytes: int,
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self.model = model
        self.placement = placement
        self._train_step = train_step
        self._clock = clock
        self._meter = meter
        self._metrics = metrics
        self._counted = (0, 0)
        self._fixed = {"planned_host_bytes": planned_host_bytes, "pinned_bytes": pinned_bytes}

    def train(
        self,
        state: RunState,
        data: StepData,
        total_steps: int,
        stop: StopRequest,
        on_line: Callable[[Line], None],
        after_step: Callable[[RunState], RunState],
    ) -> RunState:
        """Trains until ``total_steps`` and returns the last committed state.

        A metrics line is durable before its step is committed. The update and the commit run beside the next step; what
        that step waits for them counts in its line.

        Args:
            on_line: told each line, for progress.
            after_step: called after each commit, for evaluations; returns the state to go on with.

        Raises:
            StoppedError: a stop was requested; the last step is committed.
            NonfiniteError: the loss or a gradient of a step is inf or nan; the step before is committed.
        """
        self.placement.finish_commit()
        self._clock.lap()
        self._counted = self.placement.io_bytes()
        while state.step < total_steps:
            if stop.requested:
                # What came after the last commit, such as an evaluation, is kept too.
                self.placement.begin_commit(state.encode())
                self._drain(state.step)
                raise StoppedError(f"stopped by {stop.signal_name} after step {state.step} of {total_steps}")
            step = state.step + 1
            try:
                batches, following = data.of_step(step), data.of_step(step + 1)
            except MemascendError:
                # Streamed data that is damaged further on: the steps before it are kept.
                self.placement.begin_commit(state.encode())
                self._drain(state.step)
                raise
            try:
                result = self._train_step(step, batches, following)
            except NonfiniteError:
                self.placement.cancel_update()
                self._drain(state.step)
                raise
            facts, kept = noise_facts(result.noise, state.results.get("noise"))
            line = self._line(result) | facts
            extra = {
                **kept,
                "loss_last": result.loss,
                "seconds": state.results.get("seconds", 0.0) + line["step_seconds"],
            }
            if step == 1:
                extra["loss_first"] = result.loss
            if result.skipped is not None:
                self._warn(result.skipped)
            state = state.after(
                step,
                self._metrics.write(line),
                result.tokens,
                result.scaling,
                sequences=data.sequences,
                position=data.position_after(step),
                **extra,
            )
            self.placement.begin_commit(state.encode())
            trace.phase(None)
            on_line(line)
            state = after_step(state)
        self._drain(state.step)
        return state

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Keeps the time, and the bytes read and written, of what the block does out of the lines of the steps."""
        # What the update under way still moves is the step's.
        self.placement.finish_update()
        before = self.placement.io_bytes()
        yield
        after = self.placement.io_bytes()
        self._counted = (
            self._counted[0] + after[0] - before[0],
            self._counted[1] + after[1] - before[1],
        )
        self._clock.lap()

    def _drain(self, step: int) -> None:
        """Waits until ``step`` is committed; its update has a line of its own, for no step follows."""
        self.placement.finish_commit()
        self._metrics.write(
            {"step": step, "drain": True, **self._clock.lap(), **self._moved_bytes(self.placement.io_bytes())}
        )

    def _moved_bytes(self, counted: tuple[int, int]) -> dict[str, int]:
        """The bytes moved from what the last call was given to ``counted``."""
        (read_before, written_before), self._counted = self._counted, counted
        read, written = counted
        return {"ssd_read_bytes": read - read_before, "ssd_write_bytes": written - written_before}

    def _line(self, result: StepResult) -> Line:
        memory = self._meter.snapshot()
        return {
            "step": result.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_steps": result.scaling.skipped_steps,
            "tokens": result.tokens,
            **self._clock.lap(),
            **self._moved_bytes(result.io_bytes),
            "host_rss_bytes": memory.rss_bytes,
            "host_peak_bytes": memory.peak_rss_bytes,
            **self._fixed,
            "device_peak_bytes": device_peak_bytes(),
            **norm_facts(result.stage_norms, self.model.layout.n_layers),
        }


def evaluate(
    model: StreamedModel, examples: PackedExamples, *, limit: int | None, batch_size: int, group: int
) -> float:
    """Returns the mean loss over the trained tokens of ``examples``.

    Args:
        limit: sequences to read, the first ones; None: all.
        batch_size: sequences per micro-batch; the training's, so that its executables serve.
        group: micro-batches whose activations are held at once; each group is one pass over the model.
    """
    count = len(examples) if limit is None else min(limit, len(examples))
    batches = [_eval_batch(examples, start, count, batch_size) for start in range(0, count, batch_size)]
    while len(batches) % min(group, len(batches)):
        # Groups of one size share the embedding's executable; weight zero keeps the mean as it is.
        batches.append(_without_weight(batches[0]))
    total = weight = 0.0
    for start in range(0, len(batches), group):
        loss, trained = model.evaluate(batches[start : start + group])
        total, weight = total + loss, weight + trained
    return total / weight


def _eval_batch(examples: PackedExamples, start: int, count: int, batch_size: int) -> Microbatch:
    indices = list(range(start, min(start + batch_size, count)))
    batch = examples.batch(indices + [start] * (batch_size - len(indices)))
    batch.weights[len(indices) :] = 0.0
    return batch


def _without_weight(batch: Microbatch) -> Microbatch:
    return replace(batch, weights=np.zeros_like(batch.weights))


def device_peak_bytes() -> int | None:
    """Returns the device's peak memory in use, or None where the backend does not count it (CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else None
