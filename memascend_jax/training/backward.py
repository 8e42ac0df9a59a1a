# SPDX-License-Identifier: Apache-2.0
"""The backward of a step: head, final norm, layers, embedding rows; every micro-batch through a stage before the next.

A layer recomputes its forward. The gradient of a stage is summed over the micro-batches on the device in fp32 and
leaves it once, rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.training.batch_rows import BatchRows
from memascend_jax.training.device_batch import DeviceBatch
from memascend_jax.training.gradients import RowGradient, StepGradients
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.prefetch import Prefetcher
from memascend_jax.training.stage_functions import Arrays, StageFunctions
from memascend_jax.training.stage_inputs import StageInputs
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey


@dataclass(slots=True)
class Backward:
    """Carries one step's gradients down; its methods are called in their order.

    ``xs`` and their gradients are lists of one array ``[B, S, H]`` per micro-batch.
    """

    layout: ModelLayout
    functions: StageFunctions
    clock: StepClock
    inputs: StageInputs
    stages: Prefetcher
    batches: list[DeviceBatch]
    rows: BatchRows
    gradients: StepGradients
    #: Of a tied table: the head's unrounded gradient of the rows that the step uses.
    _table_rows: jax.Array | None = field(default=None, init=False)

    def head(
        self,
        normed: Sequence[jax.Array],
        carries: Sequence[Any],
        tile_starts: Sequence[jax.Array],
        scale: jax.Array,
    ) -> list[jax.Array]:
        """Returns the gradients of ``normed``, in fp32; puts the table's away tile by tile, the last one first."""
        functions, layout = self.functions, self.layout
        dxns = [functions.zeros(xn.shape, "float32") for xn in normed]
        padded_rows = functions.put(self.rows.padded)
        if layout.tied:
            self._table_rows = functions.zeros(self._rows_shape, "float32")
        for tile in reversed(range(layout.n_head_tiles)):
            weight, start = self.stages.use(StageKey(HEAD, tile))["weight"], tile_starts[tile]
            dw: jax.Array | None = None
            for index, (batch, xn) in enumerate(zip(self.batches, normed, strict=True)):
                dxns[index], dw = functions.head_backward(
                    weight, xn, batch.labels, batch.weights, carries[index], scale, start, dxns[index], dw
                )
            del weight
            rounded, norm, self._table_rows = functions.finish_head_tile(
                dw, self._table_rows, padded_rows, start
            )
            part = layout.stage_parts[StageKey(HEAD, tile)][0]
            self.stages.advance()
            self.gradients.put(part.tensor, part.start, rounded, norm, part.n_elements)
        return dxns

    def norm(self, xs: Sequence[jax.Array], dxns: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the gradients of ``xs``, the last layer's outputs, and puts that of the norm's weight away."""
        weight = self.stages.use(StageKey(NORM, 0))["weight"]
        dxs: list[jax.Array] = []
        accumulated: Any = None
        for index, (x, dxn) in enumerate(zip(xs, dxns, strict=True)):
            dx, accumulated = self.functions.head_finish(
                weight, x, dxn, accumulated, last=index == len(self.batches) - 1
            )
            dxs.append(dx)
        del weight
        self.stages.advance()
        self.gradients.put_stage({"weight": NORM_NAME}, *accumulated)
        return dxs

    def layers(self, dys: list[jax.Array]) -> list[jax.Array]:
        """Returns the gradients of the first layer's inputs from those of the last one's outputs, which it consumes."""
        pending: tuple[int, Arrays, jax.Array] | None = None
        for index in reversed(range(self.layout.n_layers)):
            dys, rounded, norms = self._layer(index, dys)
            # The layer above is put away while this one computes.
            if pending is not None:
                self._put_layer(*pending)
            pending = (index, rounded, norms)
        if pending is not None:
            self._put_layer(*pending)
        return dys

    def embedding(self, dxs: Sequence[jax.Array]) -> None:
        """Puts the gradient of the embedding's rows away, of a tied table with the head's part."""
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

    def _layer(self, index: int, dys: Sequence[jax.Array]) -> tuple[list[jax.Array], Arrays, jax.Array]:
        params = self.stages.use(StageKey(LAYER, index))
        accumulated: Any = None
        dxs: list[jax.Array] = []
        for number, batch in enumerate(self.batches):
            dx, accumulated = self.functions.layer_backward(
                params,
                self.inputs.take(),
                dys[number],
                batch.positions,
                batch.segments,
                accumulated,
                last=number == len(self.batches) - 1,
            )
            dxs.append(dx)
        del params
        self.stages.advance()
        rounded, norms = accumulated
        return dxs, rounded, norms

    def _put_layer(self, index: int, rounded: Arrays, norms: jax.Array) -> None:
        names = {part.local_name: part.tensor for part in self.layout.stage_parts[StageKey(LAYER, index)]}
        self.gradients.put_stage(names, rounded, norms)
