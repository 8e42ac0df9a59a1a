# SPDX-License-Identifier: Apache-2.0
"""What a metrics line says of the gradient beside its norm: the norms of stages and the noise scale. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memascend_jax.optim.noise_scale import NoiseEstimate

#: Digits of a norm: a line of 80 layers stays below a kilobyte.
_DIGITS = 4


def norm_facts(norms: Mapping[str, float] | None, n_layers: int) -> dict[str, Any]:
    """Returns ``grad_norms``: of ``embed``, of all ``layers`` in order and of the ``head``; null where all is frozen.

    Args:
        norms: by stage; None: not asked for.
    """
    if norms is None:
        return {}
    rounded = {stage: float(f"{norm:.{_DIGITS}g}") for stage, norm in norms.items()}
    layers = [rounded.get(f"layer.{index}") for index in range(n_layers)]
    return {"grad_norms": {"embed": rounded.get("embed"), "layers": layers, "head": rounded.get("head")}}


def noise_facts(
    now: NoiseEstimate | None, kept: Sequence[float] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a line says of the noise scale, and what the run's state keeps of it: ``noise``.

    Args:
        now: the estimates of this step; None: not asked for, or there are none.
        kept: running means that the state has.
    """
    if now is None:
        return {}, {}
    means = NoiseEstimate(*(kept or ())).followed_by(now)
    facts = {"noise_trace": now.trace, "noise_grad_square": now.square, "noise_scale": means.scale}
    return facts, {"noise": [means.trace, means.square]}
