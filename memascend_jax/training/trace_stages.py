# SPDX-License-Identifier: Apache-2.0
"""Puts the compiled stage functions on the timeline, with the time when the device really worked on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from memascend_jax.observe.array_watch import ArrayWatch
from memascend_jax.observe.trace import Recorder
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_schedule import NORM


def trace_stages(functions: StageFunctions, recorder: Recorder) -> None:
    """Makes every compiled function of ``functions`` record its calls, named by what it does and its stage."""
    watch = recorder.watch_computing()
    for name, function in list(vars(functions).items()):
        if hasattr(function, "lower"):
            setattr(functions, name, _recorded(name, function, watch, recorder))


def _recorded(
    name: str, function: Callable[..., Any], watch: ArrayWatch, recorder: Recorder
) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        now = time.perf_counter_ns()
        results = function(*args, **named)
        watch.dispatched(_label(name, recorder.stage), now, jax.tree.leaves(results))
        return results

    return call


def _label(function: str, stage: str) -> str:
    """Returns the function's name, with the stage if the function belongs to it: ``layer_backward layer.3``."""
    kind = stage.partition(".")[0]
    belongs = kind in function or (kind == NORM and function.startswith("head"))
    return f"{function} {stage}" if kind and belongs else function
