# SPDX-License-Identifier: Apache-2.0
"""Compiles the large stage functions of a run in a process of its own, before the run's arena is filled.

The compiler takes about 200 MiB while it works, of which 40 stay with the process for good. The executables go to jax's
persistent cache, from which the run's first step loads them in a second or two and 50 MiB.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.allocator import limit_heap_growth
from memascend_jax.models.llama import LlamaStages
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_schedule import HEAD, LAYER, StageKey

logger = logging.getLogger(__name__)


def precompile_apart(
    layout: ModelLayout, micro_batch: tuple[int, int], n_micro_batches: int, cache: Path
) -> bool:
    """Runs ``precompile`` in a child process that fills the persistent cache in ``cache``; returns whether it did.

    A failure costs memory and nothing else: the run compiles what it does not find.
    """
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
    }
    # In a session of its own: Ctrl-C is for the run, which waits for the child or kills it.
    child = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=pickle.dumps((layout, micro_batch, n_micro_batches)),
        env=environment,
        capture_output=True,
        start_new_session=True,
        check=False,
    )
    if child.returncode != 0:
        logger.warning("compiling ahead failed: %s", child.stderr.decode(errors="replace")[-500:])
    return child.returncode == 0


def precompile(
    functions: StageFunctions, layout: ModelLayout, micro_batch: tuple[int, int], n_micro_batches: int
) -> None:
    """Compiles what a step of ``n_micro_batches`` of shape ``micro_batch`` (sequences, tokens) runs longest.

    The small functions, such as norms and the embedding, are left to the first step.
    """
    _compile_layer(functions, layout, micro_batch, n_micro_batches)
    _compile_head(functions, layout, micro_batch, n_micro_batches)


def _compile_layer(
    functions: StageFunctions, layout: ModelLayout, micro_batch: tuple[int, int], n_micro_batches: int
) -> None:
    dtype = to_dtype(layout.format.param_dtype)
    parts = layout.stage_parts[StageKey(LAYER, 0)]
    params = {part.local_name: functions.shape(part.memory_shape, dtype) for part in parts}
    x = functions.shape((*micro_batch, layout.config.hidden_size), functions.compute_dtype)
    index = functions.shape(micro_batch, jnp.int32)
    _compile(functions.layer, params, x, index, index)
    sums = {name: functions.shape(value.shape, jnp.float32) for name, value in params.items()}
    # What is summed so far: none before the first micro-batch; the last one rounds.
    calls: list[tuple[Any, bool]] = [(None, True)] if n_micro_batches == 1 else [(None, False), (sums, True)]
    if n_micro_batches > 2:
        calls.append((sums, False))
    for accumulated, last in calls:
        _compile(functions.layer_backward, params, x, x, index, index, accumulated, last=last)


def _compile_head(
    functions: StageFunctions, layout: ModelLayout, micro_batch: tuple[int, int], n_micro_batches: int
) -> None:
    (part,) = layout.stage_parts[StageKey(HEAD, 0)]
    shape = functions.shape
    weight = shape(part.memory_shape, to_dtype(layout.format.param_dtype))
    xn = shape((*micro_batch, layout.config.hidden_size), functions.compute_dtype)
    labels, weights = shape(micro_batch, jnp.int32), shape(micro_batch, jnp.float32)
    carry = jax.tree.map(
        lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(lambda: functions.head_carry(*micro_batch))
    )
    start, scale = shape((), jnp.int32), shape((), jnp.float32)
    _compile(functions.head_logsumexp, carry, weight, xn, labels, start)
    dxn, dw = shape(xn.shape, jnp.float32), shape(weight.shape, jnp.float32)
    for accumulated in (None,) if n_micro_batches == 1 else (None, dw):
        _compile(functions.head_backward, weight, xn, labels, weights, carry, scale, start, dxn, accumulated)


def _compile(function: Any, *args: Any, **static: Any) -> None:
    # The executable is dropped: jit's own call compiles again, and finds it in the persistent cache.
    function.lower(*args, **static).compile()


def _main() -> None:
    limit_heap_growth()
    layout, micro_batch, n_micro_batches = pickle.load(sys.stdin.buffer)
    stages = LlamaStages(layout.config, layout.format.param_dtype)
    functions = StageFunctions(stages, layout.format.grad_dtype)
    precompile(functions, layout, micro_batch, n_micro_batches)


if __name__ == "__main__":
    _main()
