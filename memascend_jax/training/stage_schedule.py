# SPDX-License-Identifier: Apache-2.0
"""The order in which stages are used in a step, and when each is read and dropped. Pure.

A step is a fixed sequence of uses: the layers upwards, the head's vocabulary tiles twice (log-sum-exp, then
gradient, in zig-zag), the layers downwards. Because the sequence is known, what stays in memory is chosen by
Belady's rule: when a slot group is needed, the resident stage whose next use is farthest away goes. At the top turn
the last layers are therefore still there for the backward, and every further slot group saves one read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LAYER, HEAD, NORM = "layer", "head", "norm"


@dataclass(frozen=True, slots=True, order=True)
class StageKey:
    """A thing that is read as a unit: layer ``index``, vocabulary tile ``index`` of the head, or the final norm."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.index}"


@dataclass(frozen=True, slots=True)
class Action:
    """What happens before the use at one position: ``drops`` first, then ``loads``, each in order."""

    drops: tuple[StageKey, ...]
    loads: tuple[StageKey, ...]


def training_sequence(n_layers: int, n_head_tiles: int, lowest: int = -1) -> list[StageKey]:
    """Returns the uses of one training step, the embedding's row reads apart.

    Args:
        lowest: the layer at which the backward ends, ``n_layers``: at the norm, ``n_layers + 1``: at the head.
    """
    layers = [StageKey(LAYER, i) for i in range(n_layers)]
    tiles = [StageKey(HEAD, i) for i in range(n_head_tiles)]
    norm = StageKey(NORM, 0)
    downwards = [norm, *reversed(layers[max(lowest, 0) :])] if lowest <= n_layers else []
    return [*layers, norm, *tiles, *reversed(tiles), *downwards]


def forward_sequence(n_layers: int, n_head_tiles: int) -> list[StageKey]:
    """Returns the uses of a forward pass to the loss or to the next token."""
    layers = [StageKey(LAYER, i) for i in range(n_layers)]
    return [*layers, StageKey(NORM, 0), *(StageKey(HEAD, i) for i in range(n_head_tiles))]


def plan_actions(
    sequence: Sequence[StageKey],
    capacity: Mapping[str, int],
    depth: int,
    *,
    staying: Collection[StageKey] = (),
    are_there: bool = False,
) -> list[Action]:
    """Returns what to drop and load before each use.

    Args:
        sequence: the uses in order.
        capacity: how many keys of each kind may be resident at once, at least 1 more than stay where others are used.
        depth: how many uses ahead to read.
        staying: keys that are never dropped, and still there when the sequence begins anew.
        are_there: the sequence does begin anew.

    Returns:
        One action per position. Everything still resident after the last use is left to the caller.
    """
    following = _next_uses(sequence)
    resident: dict[StageKey, int] = {}
    stays = set(staying)
    missing = set() if are_there else set(staying)
    room = {kind: count - sum(key.kind == kind for key in stays) for kind, count in capacity.items()}
    actions: list[Action] = []
    last_use: dict[StageKey, int] = {}
    for here, key in enumerate(sequence):
        last_use[key] = here
        for known in resident:
            resident[known] = _use_from(following, known, here)
        drops: list[StageKey] = []
        loads: list[StageKey] = []
        full: set[str] = set()
        for ahead in range(here, min(here + depth, len(sequence) - 1) + 1):
            wanted = sequence[ahead]
            if wanted in stays:
                if wanted in missing and wanted.kind not in full:
                    missing.discard(wanted)
                    loads.append(wanted)
                continue
            if wanted in resident or wanted.kind in full:
                continue
            same_kind = [known for known in resident if known.kind == wanted.kind]
            if len(same_kind) >= room[wanted.kind]:
                # Of those that are not needed again, the one whose computation is over.
                victim = max(same_kind, key=lambda known: (resident[known], -last_use.get(known, here)))
                if victim == key or resident[victim] <= ahead:
                    # Later uses of this kind must not overtake this one.
                    full.add(wanted.kind)
                    continue
                del resident[victim]
                drops.append(victim)
            resident[wanted] = ahead
            loads.append(wanted)
        actions.append(Action(tuple(drops), tuple(loads)))
    return actions


def count_loads(actions: Sequence[Action]) -> dict[StageKey, int]:
    """Returns how often each key is read when ``actions`` are carried out from an empty memory."""
    counts: dict[StageKey, int] = {}
    for action in actions:
        for key in action.loads:
            counts[key] = counts.get(key, 0) + 1
    return counts


def _next_uses(sequence: Sequence[StageKey]) -> dict[StageKey, list[int]]:
    positions: dict[StageKey, list[int]] = {}
    for position, key in enumerate(sequence):
        positions.setdefault(key, []).append(position)
    return positions


def _use_from(positions: Mapping[StageKey, Sequence[int]], key: StageKey, here: int) -> int:
    never = 1 << 60
    return next((position for position in positions[key] if position >= here), never)
