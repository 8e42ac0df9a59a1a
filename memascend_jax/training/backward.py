# SPDX-License-Identifier: Apache-2.0
"""The backward of a step: head, final norm, layers, embedding rows; every micro-batch through a stage before the next.

A layer recomputes its forward. The gradient of a stage is summed over the micro-batches on the device in fp32 and
leaves it once, rounded. What is frozen has none, and the backward ends at the lowest stage of which something is
trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.training.backward_reach import BackwardReach
from memascend_jax.training.batch_rows import BatchRows
from memascend_jax.training.device_batch import DeviceBatch
from memascend_jax.training.gradients import RowGradient, StepGradients
from memascend_jax.training.model_layout import ModelLayout, StagePart
from memascend_jax.training.prefetch import Prefetcher
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_inputs import StageInputs
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey

#: One array ``[B, S, H]`` per micro-batch, or None where nothing below needs the gradient.
Passed = list[jax.Array | None]


@dataclass(slots=True)
class Backward:
    """Carries one step's gradients down; its methods are called in their order.

    Args:
        squares: fp32 scalars, one per micro-batch, to which norm² of its gradients is added, those of the embedding
            left out; or None for each where nobody asks.
    """

    layout: ModelLayout
    reach: BackwardReach
    functions: StageFunctions
    clock: StepClock
    inputs: StageInputs
    stages: Prefetcher
    batches: list[DeviceBatch]
    rows: BatchRows
    gradients: StepGradients
    squares: list[jax.Array | None]
    #: Of a tied table: the head's unrounded gradient of the rows that the step uses.
    _table_rows: jax.Array | None = field(default=None, init=False)

    def head(
        self,
        normed: Sequence[jax.Array],
        carries: Sequence[Any],
        tile_starts: Sequence[jax.Array],
        scale: jax.Array,
    ) -> Passed:
        """Returns the gradients of ``normed``, in fp32; puts the table's away tile by tile, the last one first."""
        functions, layout = self.functions, self.layout
        trained = layout.is_trained(layout.head_tensor)
        passes = self.reach.passes(StageKey(HEAD, 0))
        dxns: Passed = [functions.zeros(xn.shape, "float32") if passes else None for xn in normed]
        padded_rows = functions.put(self.rows.padded) if trained else None
        if layout.tied and trained:
            self._table_rows = functions.zeros(self._rows_shape, "float32")
        # Of a tied table only a part is known here: it counts as the embedding's.
        squares = [None for _ in normed] if layout.tied else self.squares
        pending: tuple[StagePart, jax.Array, jax.Array] | None = None
        for tile in reversed(range(layout.n_head_tiles)):
            weight, start = self.stages.use(StageKey(HEAD, tile))["weight"], tile_starts[tile]
            dw: jax.Array | None = None
            for index, (batch, xn) in enumerate(zip(self.batches, normed, strict=True)):
                dxns[index], dw, squares[index] = functions.head_backward(
                    weight,
                    xn,
                    batch.labels,
                    batch.weights,
                    carries[index],
                    scale,
                    start,
                    dxns[index],
                    dw,
                    squares[index],
                    trained=trained,
                )
            del weight
            if not trained:
                self.stages.advance()
                continue
            rounded, norm, self._table_rows = functions.finish_head_tile(
                dw, self._table_rows, padded_rows, start
            )
            # The tile before is put away while this one computes.
            if pending is not None:
                self._put_tile(*pending)
            pending = layout.stage_parts[StageKey(HEAD, tile)][0], rounded, norm
            self.stages.advance()
        if pending is not None:
            self._put_tile(*pending)
        return dxns

    def norm(self, xs: Sequence[jax.Array], dxns: Passed) -> Passed:
        """Returns the gradients of ``xs``, the last layer's outputs, and puts that of the norm's weight away."""
        key = StageKey(NORM, 0)
        if not self.reach.includes(key):
            return [None for _ in xs]
        weight, trained = self.stages.use(key)["weight"], bool(self.layout.trained_parts(key))
        dxs: Passed = []
        accumulated: Any = None
        for index, (x, dxn) in enumerate(zip(xs, dxns, strict=True)):
            dx, accumulated, self.squares[index] = self.functions.head_finish(
                weight,
                x,
                dxn,
                accumulated,
                self.squares[index],
                trained=trained,
                passes=self.reach.passes(key),
                last=index == len(self.batches) - 1,
            )
            dxs.append(dx)
        del weight
        self.stages.advance()
        if trained:
            self.gradients.put_stage({"weight": NORM_NAME}, *accumulated)
        return dxs

    def layers(self, dys: Passed) -> Passed:
        """Returns the gradients of the lowest layer's inputs, from those of the last one's outputs (consumed)."""
        pending: tuple[int, Any] | None = None
        for index in reversed(range(self.reach.first_layer, self.layout.n_layers)):
            dys, accumulated = self._layer(StageKey(LAYER, index), dys)
            # The layer above is put away while this one computes.
            if pending is not None:
                self._put_layer(*pending)
            pending = (index, accumulated)
        if pending is not None:
            self._put_layer(*pending)
        return dys

    def embedding(self, dxs: Passed) -> None:
        """Puts the gradient of the embedding's rows away, of a tied table with the head's part."""
        if not self.reach.embedding:
            return
        accumulated = self.functions.zeros(self._rows_shape, "float32")
        for batch, dx in zip(self.batches, dxs, strict=True):
            accumulated = self.functions.embed_backward(dx, batch.inverse, accumulated)
        rounded, norm = self.functions.finish_rows(accumulated, self._table_rows)
        with self.clock.span("device_to_host"):
            values = np.asarray(rounded)[: len(self.rows.rows)].copy()
        self.gradients.put_rows(EMBED_NAME, RowGradient(self.rows.rows, values), norm)

    @property
    def _rows_shape(self) -> tuple[int, int]:
        return len(self.rows.padded), self.layout.config.hidden_size

    def _layer(self, key: StageKey, dys: Passed) -> tuple[Passed, Any]:
        """Returns the gradients of the inputs, and the rounded gradients with their norms² (None of a frozen layer)."""
        params, passes = self.stages.use(key), self.reach.passes(key)
        trained = tuple(part.local_name for part in self.layout.trained_parts(key))
        accumulated: Any = None
        dxs: Passed = []
        for number, batch in enumerate(self.batches):
            arguments = (
                params,
                self.inputs.take(),
                dys[number],
                batch.positions,
                batch.segments,
                accumulated,
                self.squares[number],
                self.functions.kinds[key.index],
            )
            static = {"trained": trained, "last": number == len(self.batches) - 1}
            if passes:
                dx, accumulated, self.squares[number] = self.functions.layer_backward(*arguments, **static)
            else:
                dx = None
                accumulated, self.squares[number] = self.functions.lowest_layer_backward(*arguments, **static)
            dxs.append(dx)
            # The next input may need the slot of this one.
            del arguments
        del params
        self.stages.advance()
        return dxs, accumulated

    def _put_tile(self, part: StagePart, rounded: jax.Array, norm: jax.Array) -> None:
        self.gradients.put(part.tensor, part.start, rounded, norm, part.n_elements)

    def _put_layer(self, index: int, accumulated: Any) -> None:
        if accumulated is None:
            return
        parts = self.layout.trained_parts(StageKey(LAYER, index))
        self.gradients.put_stage({part.local_name: part.tensor for part in parts}, *accumulated)
