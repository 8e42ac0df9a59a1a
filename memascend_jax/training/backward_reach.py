# SPDX-License-Identifier: Apache-2.0
"""How far down a step's backward goes: to the lowest stage of which something is trained, and no further. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey

#: Position of the embedding; layers are at their index, the final norm and the head behind them.
EMBEDDING = -1


@dataclass(frozen=True, slots=True)
class BackwardReach:
    """The lowest position with a gradient: ``EMBEDDING``, a layer's index, ``n_layers`` (norm) or one more (head)."""

    lowest: int
    n_layers: int

    @property
    def embedding(self) -> bool:
        """Whether the embedding's rows have a gradient."""
        return self.lowest == EMBEDDING

    @property
    def first_layer(self) -> int:
        """The lowest layer that is run backward, ``n_layers`` if none is: the inputs of those below are not kept."""
        return min(max(self.lowest, 0), self.n_layers)

    @property
    def layers(self) -> int:
        """How many layers are run backward."""
        return self.n_layers - self.first_layer

    def includes(self, key: StageKey) -> bool:
        """Returns whether ``key`` is run backward."""
        return self._position(key) >= self.lowest

    def passes(self, key: StageKey) -> bool:
        """Returns whether something below ``key`` needs the gradient of its input."""
        return self._position(key) > self.lowest

    def _position(self, key: StageKey) -> int:
        return key.index if key.kind == LAYER else self.n_layers + (key.kind == HEAD)


def staying_stages(
    layout: ModelLayout, capacity: Mapping[str, int], prefetch_depth: int
) -> frozenset[StageKey]:
    """Returns the stages that stay in memory between steps, where slots can be spared for them: what is frozen of them
    is not read again, what is trained is asked for anew after each update.

    Those that read ahead keep their slots, unless all stages of the kind have one. What the backward needs too is read
    twice in a step, and comes first; then what is frozen as a whole.
    """
    reach = backward_reach(layout)
    chosen: list[StageKey] = []
    for kind, slots in capacity.items():
        keys = [key for key in layout.stage_parts if key.kind == kind]
        frozen = [key for key in keys if len(layout.trained_parts(key)) < len(layout.stage_parts[key])]
        room = slots if slots >= len(keys) else slots - (prefetch_depth + 1)
        frozen.sort(key=lambda key: (not reach.includes(key), bool(layout.trained_parts(key)), key.index))
        chosen += frozen[: max(room, 0)]
    return frozenset(chosen)


def backward_reach(layout: ModelLayout) -> BackwardReach:
    """Returns the reach of the backward of ``layout``, of which something is trained.

    A tied table is the embedding's: to train it the backward goes all the way down.
    """
    n_layers = layout.n_layers
    if layout.is_trained(EMBED_NAME):
        return BackwardReach(EMBEDDING, n_layers)
    order = [*(StageKey(LAYER, index) for index in range(n_layers)), StageKey(NORM, 0)]
    lowest = next((number for number, key in enumerate(order) if layout.trained_parts(key)), n_layers + 1)
    return BackwardReach(lowest, n_layers)
