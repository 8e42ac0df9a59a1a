# SPDX-License-Identifier: Apache-2.0
"""Compiles the large stage functions of a run in a process of its own, before the run's arena is filled.

The compiler takes about 200 MiB while it works, of which 40 stay with the process for good. The executables go to jax's
persistent cache, from which the run's first step loads them in a second or two and 50 MiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memascend_jax import __version__
from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.allocator import limit_heap_growth
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.training.backward_reach import backward_reach
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_schedule import HEAD, LAYER, StageKey

logger = logging.getLogger(__name__)


def precompile_apart(
    layout: ModelLayout,
    micro_batch: tuple[int, int],
    n_micro_batches: int,
    cache: Path,
    *,
    micro_norms: bool = False,
) -> bool:
    """Runs ``precompile`` in a child process that fills the persistent cache in ``cache``; returns whether it is full.

    Once it has, a mark in the cache spares the next run the same. A failure costs memory and nothing else: the run
    compiles what it does not find.
    """
    work = pickle.dumps((layout, micro_batch, n_micro_batches, micro_norms))
    made_by = f"{__version__} {jax.__version__}".encode()
    mark = cache / f"compiled-{hashlib.sha256(made_by + work).hexdigest()[:16]}"
    if mark.exists():
        return True
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
    }
    # In a session of its own: Ctrl-C is for the run, which waits for the child or kills it.
    child = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=work,
        env=environment,
        capture_output=True,
        start_new_session=True,
        check=False,
    )
    if child.returncode != 0:
        logger.warning("compiling ahead failed: %s", child.stderr.decode(errors="replace")[-500:])
        return False
    with contextlib.suppress(OSError):
        mark.touch()
    return True


def precompile(
    functions: StageFunctions,
    layout: ModelLayout,
    micro_batch: tuple[int, int],
    n_micro_batches: int,
    micro_norms: bool,
) -> None:
    """Compiles what a step of ``n_micro_batches`` of shape ``micro_batch`` (sequences, tokens) runs longest.

    With ``micro_norms`` as a step does that finds out the norms of micro-batches.

    The small functions, such as norms and the embedding, are left to the first step.
    """
    _compile_layer(functions, layout, micro_batch, n_micro_batches, micro_norms)
    _compile_head(functions, layout, micro_batch, n_micro_batches, micro_norms)


def _compile_layer(
    functions: StageFunctions,
    layout: ModelLayout,
    micro_batch: tuple[int, int],
    n_micro_batches: int,
    micro_norms: bool,
) -> None:
    dtype = to_dtype(layout.format.param_dtype)
    parts = layout.stage_parts[StageKey(LAYER, 0)]
    params = {part.local_name: functions.shape(part.memory_shape, dtype) for part in parts}
    x = functions.shape((*micro_batch, layout.config.hidden_size), functions.compute_dtype)
    index = functions.shape(micro_batch, jnp.int32)
    kind = None if functions.kinds[0] is None else functions.shape((), jnp.int32)
    _compile(functions.layer, params, x, index, index, kind)
    sums = {name: functions.shape(value.shape, jnp.float32) for name, value in params.items()}
    # What is summed so far: none before the first micro-batch; the last one rounds.
    calls: list[tuple[bool, bool]] = (
        [(False, True)] if n_micro_batches == 1 else [(False, False), (True, True)]
    )
    if n_micro_batches > 2:
        calls.append((True, False))
    square = functions.shape((), jnp.float32) if micro_norms else None
    for trained, passes in _kinds_of_layers(layout):
        function = functions.layer_backward if passes else functions.lowest_layer_backward
        for has_sums, last in calls if trained else [(False, last) for last in {last for _, last in calls}]:
            accumulated = {name: sums[name] for name in trained} if has_sums else None
            _compile(
                function, params, x, x, index, index, accumulated, square, kind, trained=trained, last=last
            )


def _kinds_of_layers(layout: ModelLayout) -> set[tuple[tuple[str, ...], bool]]:
    """Returns which sets of tensors are trained in layers that are run backward, and whether something below is."""
    reach = backward_reach(layout)
    keys = [StageKey(LAYER, index) for index in range(reach.first_layer, layout.n_layers)]
    return {(tuple(part.local_name for part in layout.trained_parts(key)), reach.passes(key)) for key in keys}


def _compile_head(
    functions: StageFunctions,
    layout: ModelLayout,
    micro_batch: tuple[int, int],
    n_micro_batches: int,
    micro_norms: bool,
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
    trained = layout.is_trained(layout.head_tensor)
    passes = backward_reach(layout).passes(StageKey(HEAD, 0))
    dxn, dw = shape(xn.shape, jnp.float32) if passes else None, shape(weight.shape, jnp.float32)
    square = shape((), jnp.float32) if micro_norms and not layout.tied else None
    arguments = (weight, xn, labels, weights, carry, scale, start, dxn)
    for accumulated in (None,) if n_micro_batches == 1 or not trained else (None, dw):
        _compile(functions.head_backward, *arguments, accumulated, square, trained=trained)


def _compile(function: Any, *args: Any, **static: Any) -> None:
    # The executable is dropped: jit's own call compiles again, and finds it in the persistent cache.
    function.lower(*args, **static).compile()


def _main() -> None:
    limit_heap_growth()
    layout, micro_batch, n_micro_batches, micro_norms = pickle.load(sys.stdin.buffer)
    stages = ModelStages(layout.config, layout.format.param_dtype, adapters=layout.adapters)
    functions = StageFunctions(stages, layout.format.grad_dtype)
    precompile(functions, layout, micro_batch, n_micro_batches, micro_norms)


if __name__ == "__main__":
    _main()
