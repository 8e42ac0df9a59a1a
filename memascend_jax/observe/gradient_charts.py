# SPDX-License-Identifier: Apache-2.0
"""Charts of what a run wrote of its gradients: norms by stage, and the noise scale beside the batch it trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from memascend_jax.observe.charts import Chart, Series

Points = list[tuple[float, float]]


def gradient_charts(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """Yields the charts that the metrics ``lines`` are enough for: what a run was not asked for it did not write."""
    yield from _norms([line for line in lines if line.get("grad_norms")])
    yield from _noise([line for line in lines if line.get("noise_scale") is not None])


def _norms(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """The stages' norms; of the layers the smallest, the median and the largest: eighty curves would show nothing."""
    found: dict[str, Points] = {}
    for line in lines:
        norms = line["grad_norms"]
        layers = [norm for norm in norms["layers"] if norm is not None]
        values = {"all": line.get("grad_norm"), "embedding": norms["embed"], "head": norms["head"]}
        if layers:
            values |= {
                "largest layer": max(layers),
                "median layer": median(layers),
                "smallest layer": min(layers),
            }
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((line["step"], value))
    if found:
        yield Chart("Gradient norm", "lines", "step", "before clipping", _series(found))


def _noise(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    if not lines:
        return
    found = {
        "noise scale": [(line["step"], line["noise_scale"]) for line in lines],
        "tokens of a step": [(line["step"], line["tokens"]) for line in lines],
    }
    note = "Running mean. A batch far below it wastes steps, one far above it wastes tokens."
    yield Chart("Gradient noise scale", "lines", "step", "trained tokens", _series(found), note=note)


def _series(found: Mapping[str, Points]) -> list[Series]:
    return [
        Series(name, [step for step, _ in points], [value for _, value in points])
        for name, points in found.items()
    ]
