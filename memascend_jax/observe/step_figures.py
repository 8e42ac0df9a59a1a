# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's steps, from the lines of its metrics: the same for a run that has ended and one that has not.

The first step is left out where there are more: it compiles, and has no update beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from memascend_jax.observe.step_clock import SPANS

#: What a step's seconds are made up of.
SPLIT = ("compute", *SPANS)
_MOVED = ("ssd_read_bytes", "ssd_write_bytes")

Line = Mapping[str, Any]


def step_figures(lines: Sequence[Line], drains: Sequence[Line]) -> dict[str, Any]:
    """Returns what the steps took; keys as in ``summary.json``.

    ``step_seconds_median`` and the bytes per step are medians, which an evaluation beside a step does not change.
    ``step_seconds`` and its split are means, which add up: medians of the parts come from different steps.

    Args:
        lines: of the steps, at least one.
        drains: of the updates that no step followed.
    """
    steady = lines[1:] or lines
    seconds = sum(line["step_seconds"] for line in steady)
    tokens = sum(line["tokens"] for line in steady)
    everything = [*lines, *drains]
    return {
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
        "step_seconds_median": round(statistics.median(line["step_seconds"] for line in steady), 6),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        **{
            name: round(sum(line.get(name, 0.0) for line in steady) / len(steady), 6)
            for name in ("step_seconds", *SPLIT)
        },
        **{name: sum(line[name] for line in everything) for name in _MOVED},
        **{f"{name}_per_step": _per_step(name, lines, drains) for name in _MOVED},
    }


def _per_step(name: str, lines: Sequence[Line], drains: Sequence[Line]) -> int:
    """The bytes of a step with an update: a run of a single step has that in the closing line.

    A line counts from the beginning of the update before its step to that of its own, so that each but the first has
    one whole update, however late that ended.
    """
    if len(lines) == 1:
        return int(sum(line[name] for line in (*lines, *drains)))
    return int(statistics.median(line[name] for line in lines[1:]))
