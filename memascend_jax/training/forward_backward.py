# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a step, stage by stage, every micro-batch through a stage before the next stage.

Parameters are read once per step and direction however many micro-batches there are. Only stage inputs are kept;
what happens to them then is in ``training.backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memascend_jax.data.packing import Microbatch
from memascend_jax.dtypes import to_dtype
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe import trace
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.training.backward import Backward
from memascend_jax.training.backward_reach import backward_reach, staying_stages
from memascend_jax.training.batch_rows import BatchRows, collect_rows
from memascend_jax.training.device_batch import DeviceBatch
from memascend_jax.training.gradients import StepGradients
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.placement import Placement
from memascend_jax.training.prefetch import Prefetcher, StayingStages
from memascend_jax.training.rows_ahead import RowsAhead
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_inputs import StageInputs
from memascend_jax.training.stage_schedule import (
    HEAD,
    LAYER,
    NORM,
    StageKey,
    forward_sequence,
    plan_actions,
    training_sequence,
)


class StreamedModel:
    """The model's forward and backward over a placement."""

    def __init__(
        self,
        layout: ModelLayout,
        functions: StageFunctions,
        placement: Placement,
        clock: StepClock,
        *,
        rows_ahead: RowsAhead,
        inputs: StageInputs,
        capacity: dict[str, int],
        prefetch_depth: int,
    ) -> None:
        self.rows_ahead = rows_ahead
        self._inputs = inputs
        self.layout = layout
        self.functions = functions
        self.placement = placement
        #: Called before each stage is computed; may hold up the computation.
        self.before_stage: Callable[[], None] = lambda: None
        self._clock = clock
        self.param_dtype = to_dtype(layout.format.param_dtype)
        self._hidden = layout.config.hidden_size
        self._norm = StageKey(NORM, 0)
        self.tile_starts = [
            functions.put(np.asarray(index * layout.head_rows, np.int32))
            for index in range(layout.n_head_tiles)
        ]
        #: How far down a backward goes.
        self.reach = backward_reach(layout)
        self._training = training_sequence(layout.n_layers, layout.n_head_tiles, self.reach.lowest)
        self._forward = forward_sequence(layout.n_layers, layout.n_head_tiles)
        staying = staying_stages(layout, capacity, prefetch_depth)
        changing = frozenset(key for key in staying if layout.trained_parts(key))
        self._staying = StayingStages(staying, changing)
        self._depth = prefetch_depth
        # Before the frozen stages that stay are in memory, and since.
        self._actions = {
            (kind, are_there): plan_actions(
                sequence, capacity, prefetch_depth, staying=self._staying.keys, are_there=are_there
            )
            for kind, sequence in (("training", self._training), ("forward", self._forward))
            for are_there in (False, True)
        }

    def loss_and_gradients(
        self,
        micro_batches: Sequence[Microbatch],
        rows: BatchRows,
        before_backward: Callable[[], None] = lambda: None,
        *,
        loss_scale: float = 1.0,
        micro_norms: bool = False,
    ) -> tuple[float, StepGradients]:
        """Returns the mean loss over the trained tokens of the step, and its gradients, put away.

        The mean is over all micro-batches together, so that any split into micro-batches agrees.

        Args:
            rows: of these micro-batches; the gradients have a row for each of ``rows.rows``.
            before_backward: called when the forward is done, before the first gradient is put away.
            loss_scale: factor on the gradients, and not on the loss that is returned.
            micro_norms: find out norm² of the gradient of each micro-batch too (``StepGradients.micro_squares``).
        """
        n_trained = sum(float(micro_batch.weights.sum()) for micro_batch in micro_batches)
        scale = self.functions.put(np.asarray(loss_scale / n_trained, np.float32))
        gradients = StepGradients(self.placement)
        with self._prefetcher("training", self._training) as stages:
            batches, xs = self._embed(micro_batches, rows)
            for index in range(self.layout.n_layers):
                outputs = self._layer_forward(stages, index, batches, xs)
                if index >= self.reach.first_layer:
                    self._inputs.put(xs)
                xs = outputs
            normed = self._head_norm(stages, xs)
            carries = self._logsumexp(stages, batches, normed)
            losses = self._losses(carries, batches)
            trace.phase("backward")
            before_backward()
            backward = Backward(
                layout=self.layout,
                reach=self.reach,
                functions=self.functions,
                clock=self._clock,
                inputs=self._inputs,
                stages=stages,
                batches=batches,
                rows=rows,
                gradients=gradients,
                squares=[self.functions.zeros((), "float32") if micro_norms else None for _ in batches],
            )
            dxns = backward.head(normed, carries, self.tile_starts, scale)
            del normed, carries
            dxs = backward.norm(xs, dxns)
            del xs, dxns
            backward.embedding(backward.layers(dxs))
            gradients.micro_squares = [float(square) for square in backward.squares if square is not None]
        return sum(float(loss) for loss in losses) / n_trained, gradients

    def evaluate(self, micro_batches: Sequence[Microbatch]) -> tuple[float, float]:
        """Returns the summed loss over the trained tokens of ``micro_batches`` and their count, in one pass."""
        rows = collect_rows(micro_batches, self.layout.config.vocab_size)
        with self._prefetcher("forward", self._forward) as stages:
            batches, xs = self._embed(micro_batches, rows)
            for index in range(self.layout.n_layers):
                xs = self._layer_forward(stages, index, batches, xs)
            xs = self._head_norm(stages, xs)
            carries = self._logsumexp(stages, batches, xs)
            total = sum(float(loss) for loss in self._losses(carries, batches))
        return total, sum(float(micro_batch.weights.sum()) for micro_batch in micro_batches)

    def forward_stages(self) -> Prefetcher:
        """Returns a prefetcher over one forward pass, for callers that run the stages themselves."""
        return self._prefetcher("forward", self._forward)

    def close(self) -> None:
        """Gives back the memory of what stays between steps."""
        self._staying.release()

    def _prefetcher(self, kind: str, sequence: Sequence[StageKey]) -> Prefetcher:
        actions = self._actions[kind, self._staying.are_there]
        return Prefetcher(
            self.placement,
            sequence,
            actions,
            self.before_stage,
            staying=self._staying,
            depth=self._depth,
        )

    def _embed(
        self, micro_batches: Sequence[Microbatch], rows: BatchRows
    ) -> tuple[list[DeviceBatch], list[jax.Array]]:
        values = self.rows_ahead.read(EMBED_NAME, rows.used)
        table = np.zeros((len(rows.padded), self._hidden), values.dtype)
        table[np.searchsorted(rows.rows, rows.used)] = values
        put = self.functions.put
        with self._clock.span("host_to_device"):
            device_table = put(table)
            batches = [
                DeviceBatch(
                    labels=put(micro_batch.labels),
                    weights=put(micro_batch.weights),
                    positions=put(micro_batch.positions),
                    segments=put(micro_batch.segments),
                    inverse=put(inverse),
                )
                for micro_batch, inverse in zip(micro_batches, rows.inverse, strict=True)
            ]
        return batches, [self.functions.embed(device_table, batch.inverse) for batch in batches]

    def _layer_forward(
        self, stages: Prefetcher, index: int, batches: list[DeviceBatch], xs: list[jax.Array]
    ) -> list[jax.Array]:
        params, kind = stages.use(StageKey(LAYER, index)), self.functions.kinds[index]
        outputs = [
            self.functions.layer(params, x, batch.positions, batch.segments, kind)
            for x, batch in zip(xs, batches, strict=True)
        ]
        del params
        stages.advance()
        return outputs

    def _head_norm(self, stages: Prefetcher, xs: list[jax.Array]) -> list[jax.Array]:
        weight = stages.use(self._norm)["weight"]
        outputs = [self.functions.head_norm(weight, x) for x in xs]
        del weight
        stages.advance()
        return outputs

    def _logsumexp(
        self, stages: Prefetcher, batches: list[DeviceBatch], normed: list[jax.Array]
    ) -> list[Any]:
        carries = [self.functions.head_carry(*batch.labels.shape) for batch in batches]
        for tile, start in enumerate(self.tile_starts):
            weight = stages.use(StageKey(HEAD, tile))["weight"]
            for index, (batch, xn) in enumerate(zip(batches, normed, strict=True)):
                carries[index] = self.functions.head_logsumexp(
                    carries[index], weight, xn, batch.labels, start
                )
            del weight
            stages.advance()
        return carries

    def _losses(self, carries: Sequence[Any], batches: Sequence[DeviceBatch]) -> list[jax.Array]:
        return [
            self.functions.head_loss(carry, batch.weights)
            for carry, batch in zip(carries, batches, strict=True)
        ]
