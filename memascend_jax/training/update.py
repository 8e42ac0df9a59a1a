# SPDX-License-Identifier: Apache-2.0
"""The optimizer update of one step over a placement, tile by tile in forward order.

The embedding rows of the next step are needed before everything else. They are updated ahead, in memory; their tiles'
turn comes last, from the same state and gradients, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe import trace
from memascend_jax.optim.adamw import AdamW, Draws, TileMemory, UpdateScale, draw_key, update_tile
from memascend_jax.optim.state_format import SCALE_ELEMENTS, Leaf
from memascend_jax.training.gradients import RowGradient, StepGradients
from memascend_jax.training.model_layout import GRADIENT, PARAMETER, ModelLayout, UpdatePiece
from memascend_jax.training.placement import LoadedGroup, Placement
from memascend_jax.training.rows_ahead import RowsAhead

#: Of the state of rows that are updated ahead this much is in memory at a time.
_ROWS_BYTES = 2 << 20


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Returns the factor that brings a gradient of global norm ``norm`` to at most ``clip_norm``."""
    return clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """How one parameter is trained.

    Attributes:
        weight_decay: decoupled, multiplied by the learning rate.
        learning_rate_factor: factor on the learning rate of the run.
    """

    weight_decay: float
    learning_rate_factor: float = 1.0


class Updater:
    """Applies AdamW to every trained parameter from the gradients of a step.

    Args:
        settings: of each parameter that is trained.
        rows: takes the embedding rows that are updated ahead.
        seed: of what stochastic rounding draws.
    """

    def __init__(
        self,
        layout: ModelLayout,
        placement: Placement,
        hyper: AdamW,
        settings: Mapping[str, TensorSettings],
        rows: RowsAhead,
        *,
        seed: int = 0,
    ) -> None:
        self.rows = rows
        self._seed = seed
        self._layout = layout
        self._placement = placement
        self._hyper = hyper
        self._settings = settings

    def io_bytes(self) -> tuple[int, int]:
        """Returns the bytes read from and written to SSD up to now."""
        return self._placement.io_bytes()

    def begin_early(self, scale: UpdateScale) -> None:
        """Starts the update in the backward: a layer is updated as soon as its gradients are there."""
        self._placement.begin_early_update(self._tile_update(None, scale))

    def skip(self) -> None:
        """Ends a step without an update: not a bit of the state changes, and rows that are kept stay right."""
        self._placement.drop_gradients()

    def begin(self, gradients: StepGradients, scale: UpdateScale, rows_ahead: NDArray[np.int64]) -> None:
        """Starts the update of all parameters, masters and moments.

        It is dense: the moments of untouched rows decay too.

        Args:
            rows_ahead: ``[n]`` ascending, embedding rows that the next step uses; ``gradients`` has a row for each.
        """
        self._placement.prepare_update()
        self.rows.forget()
        if self._placement.overlaps_update and gradients.table_gradient is not None:
            self.rows.keep(rows_ahead, self._updated_rows(gradients.table_gradient, scale, rows_ahead))
        without = frozenset(tensor.name for tensor in self._layout.trained) - gradients.spooled
        self._placement.begin_update(without, self._tile_update(gradients.table_gradient, scale))

    def _updated_rows(
        self, gradient: RowGradient, scale: UpdateScale, wanted: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Returns ``[n, columns]``: the new embedding rows ``wanted``, the store as it was."""
        fmt, columns = self._layout.format, gradient.values.shape[1]
        out = np.empty((len(wanted), columns), to_dtype(fmt.param_dtype))
        step = max(1, int(_ROWS_BYTES / (columns * fmt.stored_bytes)))
        for begin in range(0, len(wanted), step):
            rows = wanted[begin : begin + step]
            param = out[begin : begin + step]
            if not fmt.has_master:
                param[:] = self._placement.read_rows(EMBED_NAME, rows)
            state = {leaf.suffix: self._read_rows_of(leaf, rows, columns) for leaf in fmt.leaves}
            grad = np.ascontiguousarray(gradient.values[np.searchsorted(gradient.rows, rows)])
            memory = TileMemory(
                param=param.ctypes.data,
                grad=grad.ctypes.data,
                leaves={suffix: array.ctypes.data for suffix, array in state.items()},
                n_elements=grad.size,
                row_blocks=_row_groups(columns, SCALE_ELEMENTS),
            )
            draws = Draws(draw_key(self._seed, scale.count, EMBED_NAME), row_starts=rows * columns)
            with trace.span(trace.UPDATE, "update rows of", EMBED_NAME):
                self._update(EMBED_NAME, memory, scale, draws)
        return out

    def _read_rows_of(self, leaf: Leaf, rows: NDArray[np.int64], columns: int) -> NDArray[Any]:
        """Returns the leaf's values of ``rows``: ``[n, columns]``, or of scales ``[n, groups, 2]``."""
        if leaf.per == 1:
            return self._placement.read_rows(EMBED_NAME, rows, leaf.suffix)
        tile = self._layout.tile_elements[EMBED_NAME]
        vocab = self._layout.shape_of(EMBED_NAME)[0]
        # The elements at which a group of the row begins; where it has fewer groups than another, its last again.
        first = rows[:, None] * columns // leaf.per * leaf.per
        begins = first + np.arange(_row_groups(columns, leaf.per)) * leaf.per
        begins = np.minimum(begins, vocab * columns - 1)
        groups = begins // tile * (leaf.stride(tile) // leaf.width) + begins % tile // leaf.per
        values = self._placement.read_rows(EMBED_NAME, groups.reshape(-1), leaf.suffix)
        return values.reshape(*groups.shape, leaf.width)

    def _tile_update(self, rows: RowGradient | None, scale: UpdateScale) -> Callable[[LoadedGroup], None]:
        """Returns what updates a group; ``rows`` is the embedding's gradient, needed with its tiles."""

        def update(loaded: LoadedGroup) -> None:
            with trace.span(trace.UPDATE, "update", loaded.group):
                for piece in loaded.group.pieces:
                    if rows is not None and piece.tensor == EMBED_NAME:
                        self._overlay_rows(loaded, piece, rows)
                    self._update(
                        piece.tensor,
                        self._memory_of(loaded, piece),
                        scale,
                        Draws(draw_key(self._seed, scale.count, piece.tensor), piece.start),
                    )

        return update

    def _memory_of(self, loaded: LoadedGroup, piece: UpdatePiece) -> TileMemory:
        return TileMemory(
            param=loaded.address(piece, PARAMETER),
            grad=loaded.address(piece, GRADIENT),
            leaves={leaf.suffix: loaded.address(piece, leaf.suffix) for leaf in self._layout.format.leaves},
            n_elements=piece.n_elements,
        )

    def _update(self, tensor: str, memory: TileMemory, scale: UpdateScale, draws: Draws) -> None:
        settings = self._settings[tensor]
        factor = settings.learning_rate_factor
        update_tile(
            self._layout.format,
            memory,
            self._hyper,
            scale if factor == 1.0 else replace(scale, learning_rate=scale.learning_rate * factor),
            draws,
            weight_decay=settings.weight_decay,
        )

    def _overlay_rows(self, loaded: LoadedGroup, piece: UpdatePiece, gradient: RowGradient) -> None:
        """Puts the gradient of the batch's rows into the tile; the spooled gradient is zero there.

        A tile is whole rows where rows are short enough; otherwise a row spans tiles and is cut.
        """
        columns = gradient.values.shape[1]
        view = loaded.view(piece, GRADIENT)
        first_row, last_row = piece.start // columns, (piece.start + piece.n_elements - 1) // columns
        low, high = np.searchsorted(gradient.rows, [first_row, last_row + 1])
        if piece.start % columns == 0 and piece.n_elements % columns == 0:
            table = view.reshape(-1, columns)
            table[gradient.rows[low:high] - first_row] = gradient.values[low:high]
            return
        for row, values in zip(gradient.rows[low:high], gradient.values[low:high], strict=True):
            begin = int(row) * columns - piece.start
            source = values[max(0, -begin) : piece.n_elements - begin]
            view[max(0, begin) : max(0, begin) + len(source)] = source


def _row_groups(columns: int, per: int) -> int:
    """Returns how many groups of ``per`` elements a row of ``columns`` touches at most, wherever it begins."""
    return (per - 1 + columns + per - 1) // per
