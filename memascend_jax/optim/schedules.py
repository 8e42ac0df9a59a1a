# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: optax's, joined with a linear warm-up."""

from __future__ import annotations

from collections.abc import Callable


def build_schedule(
    name: str, learning_rate: float, *, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Returns ``step -> learning rate`` for steps counted from 0.

    During warm-up step ``t`` uses ``learning_rate * (t + 1) / (warmup_steps + 1)``, so that no step is spent at
    zero; afterwards ``constant`` stays, ``linear`` and ``cosine`` fall towards 0 at ``total_steps``.

    Raises:
        ValueError: ``name`` is not one of the three.
    """
    import optax

    remaining = max(total_steps - warmup_steps, 1)
    match name:
        case "constant":
            after = optax.schedules.constant_schedule(learning_rate)
        case "linear":
            after = optax.schedules.linear_schedule(learning_rate, 0.0, remaining)
        case "cosine":
            after = optax.schedules.cosine_decay_schedule(learning_rate, remaining)
        case _:
            raise ValueError(f"unknown schedule {name!r}; known are constant, linear, cosine")
    if warmup_steps == 0:
        return lambda step: float(after(step))
    warmup = optax.schedules.linear_schedule(learning_rate / (warmup_steps + 1), learning_rate, warmup_steps)
    joined = optax.schedules.join_schedules([warmup, after], [warmup_steps])
    return lambda step: float(joined(step))
