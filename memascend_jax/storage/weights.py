# SPDX-License-Identifier: Apache-2.0
"""The share of each member from its speed, so that unequal SSDs finish together. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from memascend_jax.errors import StoreError
from memascend_jax.storage.layout import MAX_MEMBERS, MAX_WEIGHT

#: A round is as short as it can be while no member keeps the others waiting longer than this.
_GOOD_ENOUGH = 1.05


def weights_from_speeds(speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns whole weights in proportion to ``speeds`` (any unit), as small as serves.

    A transfer ends with its slowest member: with weights ``w`` and speeds ``s`` it takes ``max(w/s) * sum(s) /
    sum(w)`` times what an ideal split would. The smallest weights with at most 5 % above one are taken, else the
    best there are.

    Raises:
        StoreError: no speed, more than 16, or one that is not a positive number.
    """
    if not 1 <= len(speeds) <= MAX_MEMBERS or not all(
        isinstance(speed, Real) and speed > 0 and math.isfinite(speed) for speed in speeds
    ):
        raise StoreError(
            f"speeds must be 1 to {MAX_MEMBERS} positive numbers, one per member, got {list(speeds)}"
        )
    fastest = max(speeds)
    candidates = [
        tuple(max(round(speed / fastest * scale), 1) for speed in speeds)
        for scale in range(1, MAX_WEIGHT + 1)
    ]
    good = (weights for weights in candidates if split_slowdown(weights, speeds) <= _GOOD_ENOUGH)
    return next(good, min(candidates, key=lambda weights: split_slowdown(weights, speeds)))


def split_slowdown(weights: Sequence[int], speeds: Sequence[float]) -> float:
    """Returns how many times longer a transfer takes than with an ideal split: 1 is perfect."""
    slowest = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    return slowest * sum(speeds) / sum(weights)
