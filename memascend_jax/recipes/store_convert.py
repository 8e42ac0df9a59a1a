# SPDX-License-Identifier: Apache-2.0
"""A run's store in another state format, from which the run goes on. jax-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memascend_jax.errors import ConfigError
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.observe.screen import Screen
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize, state_format
from memascend_jax.recipes.store_rewrite import Rewrite, rewrite_store
from memascend_jax.recipes.stored_run import compute_dtype, format_of, open_committed, run_of, with_config
from memascend_jax.training.run_state import RunState
from memascend_jax.training.stored_state import StoredState
from memascend_jax.units import round_up


def convert_store(
    paths: Sequence[str],
    name: str,
    into: Sequence[str] | None,
    screen: Screen,
) -> dict[str, Any]:
    """Leaves the run of a store in state format ``name``, at the same step, with everything that it remembers.

    ``fp32`` and ``split`` become each other bit for bit, and any format one of these without loss; the others are
    rounded stochastically by the run's seed, step and tensors. The store keeps its identity, so that its run's folder
    goes with it.

    Returns:
        ``paths`` and ``bytes`` of the store, ``step``, ``from`` and ``to``.

    Raises:
        ConfigError: the format is unknown, the one it has, or does not go with the run's compute dtype.
        StoreError: see ``rewrite_store``; or the store holds no run.
    """
    with open_committed(paths) as old:
        run = run_of(old)
        before = format_of(run)
        after = state_format(name, compute_dtype(run.config["model"]["compute_dtype"]))
        if after == before:
            raise ConfigError(
                f"the run in the store {', '.join(old.paths)} has state format {name} already; nothing was changed"
            )
        changed = replace(run, config=with_config(run, optimizer={"state_format": name}))
        state = StoredState(old, before)
        change = Rewrite(
            changed.encode(),
            format=after,
            seed=run.config["train"]["seed"],
            step=run.step,
            least_scratch_bytes=_step_scratch(run, state),
        )
        made = rewrite_store(old, state, change, into, screen)
        return {**made, "step": run.step, "from": before.name, "to": after.name}


def _step_scratch(run: RunState, state: StoredState) -> int:
    """What a step puts away on disk at most: where another format leaves less memory, its stage inputs too."""
    trained = [name for name in state.parameters if state.is_trained(name)]
    gradients = sum(
        round_up(math.prod(state.shape(name)) * itemsize(state.format_of(name).grad_dtype), BLOCK_BYTES)
        for name in trained
    )
    train, tokens = (
        run.config["train"],
        run.config["data"]["seq_len"] * run.config["train"]["micro_batch_size"],
    )
    layers = {name.split(".")[2] for name in state.parameters if name.startswith("model.layers.")}
    columns = state.shape(EMBED_NAME)[1] if EMBED_NAME in state.parameters else 0
    size = itemsize(state.format_of(trained[0]).param_dtype) if trained else 0
    one = round_up(tokens * columns * size, BLOCK_BYTES)
    return gradients + len(layers) * int(train["gradient_accumulation_steps"]) * one
