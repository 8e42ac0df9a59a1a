# SPDX-License-Identifier: Apache-2.0
"""The optimizer update of one step over a placement, tile by tile in forward order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from memascend_jax.optim.adamw import AdamW, TileAddresses, UpdateScale, update_tile
from memascend_jax.optim.state_format import MASTER, MU, NU
from memascend_jax.training.gradients import RowGradient, StepGradients
from memascend_jax.training.model_layout import GRADIENT, PARAMETER, ModelLayout, UpdatePiece
from memascend_jax.training.placement import LoadedGroup, Placement


def decayed_tensors(layout: ModelLayout, weight_decay: float) -> dict[str, float]:
    """Returns each parameter's weight decay: norms and other vectors are not decayed."""
    return {tensor.name: weight_decay if len(tensor.shape) > 1 else 0.0 for tensor in layout.tensors}


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Returns the factor that brings a gradient of global norm ``norm`` to at most ``clip_norm``."""
    return clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0


class Updater:
    """Applies AdamW to every parameter from the gradients of a step."""

    def __init__(
        self,
        layout: ModelLayout,
        placement: Placement,
        hyper: AdamW,
        weight_decay: Mapping[str, float],
    ) -> None:
        self._layout = layout
        self._placement = placement
        self._hyper = hyper
        self._weight_decay = weight_decay

    def apply(self, gradients: StepGradients, scale: UpdateScale) -> None:
        """Updates all parameters, masters and moments. The update is dense: untouched rows' moments decay too."""
        without = frozenset(tensor.name for tensor in self._layout.tensors) - gradients.spooled
        self._placement.update(without, self._tile_update(gradients, scale))

    def _tile_update(self, gradients: StepGradients, scale: UpdateScale) -> Callable[[LoadedGroup], None]:
        def update(loaded: LoadedGroup) -> None:
            for piece in loaded.group.pieces:
                if piece.tensor == gradients.table and gradients.table_gradient is not None:
                    self._overlay_rows(loaded, piece, gradients.table_gradient)
                self._update_piece(loaded, piece, scale)

        return update

    def _update_piece(self, loaded: LoadedGroup, piece: UpdatePiece, scale: UpdateScale) -> None:
        fmt = self._layout.format
        parameter = loaded.address(piece, PARAMETER)
        update_tile(
            TileAddresses(
                master=loaded.address(piece, MASTER) if fmt.has_master else parameter,
                mu=loaded.address(piece, MU),
                nu=loaded.address(piece, NU),
                grad=loaded.address(piece, GRADIENT),
                param=parameter if fmt.has_master else 0,
                n_elements=piece.n_elements,
            ),
            self._hyper,
            scale,
            grad_dtype=fmt.grad_dtype,
            param_dtype=fmt.param_dtype,
            weight_decay=self._weight_decay[piece.tensor],
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
