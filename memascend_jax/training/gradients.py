# SPDX-License-Identifier: Apache-2.0
"""The gradients of one step as they leave their stages: norms collected, values put away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.errors import NonfiniteError
from memascend_jax.training.placement import Placement

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True)
class RowGradient:
    """Gradient of the table rows that a step used; every other row's is zero or in the spooled gradient.

    Attributes:
        rows: ``[n]`` int64, ascending.
        values: ``[n, hidden]`` in the gradient dtype.
    """

    rows: NDArray[np.int64]
    values: NDArray[Any]


@dataclass(slots=True)
class StepGradients:
    """Collects what leaves the stages during one backward: of trained tensors only."""

    placement: Placement
    partials: dict[str, list[Any]] = field(default_factory=dict)
    spooled: set[str] = field(default_factory=set)
    table_gradient: RowGradient | None = None
    #: norm² of the unrounded gradient of each micro-batch, the embedding left out, where the step was asked for it.
    micro_squares: list[float] = field(default_factory=list)

    def put_stage(self, names: dict[str, str], rounded: dict[str, jax.Array], norms: jax.Array) -> None:
        """Takes a stage's gradients; ``names`` maps local names to the store's, ``norms`` is in sorted local order."""
        for local, gradient in rounded.items():
            self._put_away(names[local], 0, gradient, gradient.size)
        # The gradients are there by now, so reading the norms waits for nothing.
        for local, norm_squared in zip(sorted(rounded), np.asarray(norms), strict=True):
            self.partials.setdefault(names[local], []).append(norm_squared)
        self.placement.update_early(names.values())

    def put(
        self, tensor: str, start: int, rounded: jax.Array, norm_squared: jax.Array, n_elements: int
    ) -> None:
        """Takes the gradient of ``n_elements`` of ``tensor`` from ``start`` on."""
        self.partials.setdefault(tensor, []).append(norm_squared)
        self._put_away(tensor, start, rounded, n_elements)

    def _put_away(self, tensor: str, start: int, rounded: jax.Array, n_elements: int) -> None:
        self.spooled.add(tensor)
        self.placement.spool(tensor, start, rounded, n_elements)

    def put_rows(self, tensor: str, gradient: RowGradient, norm_squared: Any) -> None:
        """Takes the gradient of the embedding's rows."""
        self.partials.setdefault(tensor, []).append(norm_squared)
        self.table_gradient = gradient

    def global_norm(self) -> float:
        """Returns the norm over all tensors: fp32 partials added in float64 in name order.

        Raises:
            NonfiniteError: names the tensors whose gradient is inf or nan.
        """
        squares = {name: self._square(name) for name in sorted(self.partials)}
        if not all(math.isfinite(square) for square in squares.values()):
            raise NonfiniteError(
                f"{self.why_nonfinite()}; nothing of this step was applied. "
                "Lower optimizer.learning_rate, or look at the batch that this step trained on."
            )
        return math.sqrt(sum(squares.values()))

    def square_without(self, left_out: str) -> float:
        """Returns norm² over all tensors but ``left_out``."""
        return sum(self._square(name) for name in sorted(self.partials) if name != left_out)

    def stage_norms(self, stages: Mapping[str, str]) -> dict[str, float]:
        """Returns the norm of each stage that has a gradient; ``stages`` maps tensors to theirs."""
        squares: dict[str, float] = {}
        for name in sorted(self.partials):
            squares[stages[name]] = squares.get(stages[name], 0.0) + self._square(name)
        return {stage: math.sqrt(square) for stage, square in squares.items()}

    def why_nonfinite(self) -> str | None:
        """Returns which gradients are inf or nan, or None.

        In the order of the backward: from the first that overflowed, all that were computed of it have it.
        """
        faulty = [name for name in self.partials if not math.isfinite(self._square(name))]
        if not faulty:
            return None
        shown = ", ".join(faulty[:4]) + (f" and {len(faulty) - 4} more" if len(faulty) > 4 else "")
        return f"the gradient of {shown} is not finite ({len(faulty)} of {len(self.partials)} tensors)"

    def _square(self, name: str) -> float:
        return sum(float(np.asarray(partial).reshape(())) for partial in self.partials[name])
