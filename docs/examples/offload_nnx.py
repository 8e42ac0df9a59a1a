# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX model trained in a loop of one's own, with the state of ``optax.adamw`` on SSD.

    python docs/examples/offload_nnx.py --store /mnt/nvme/example          # 100 million parameters
    python docs/examples/offload_nnx.py --store /mnt/nvme/example --plain  # the same with plain optax

Prints a line per step, then one line of JSON: losses, seconds per step, where the state is, and how much of it is in
host memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import memascend_jax

FEATURES = 64


class Block(nnx.Module):
    """A residual block: ``x + down(gelu(up(norm(x))))``."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Regression from ``FEATURES`` numbers to one."""

    def __init__(self, width: int, blocks: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(FEATURES, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


@nnx.jit
def loss_and_grads(model: Model, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the mean squared error and its gradients."""
    return nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)


def batches(steps: int, size: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields batches of a function that takes some learning."""
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(FEATURES, 8)) / np.sqrt(FEATURES)
    for _ in range(steps):
        x = rng.normal(size=(size, FEATURES))
        yield jnp.asarray(x, jnp.float32), jnp.asarray(np.sin(x @ mix).sum(1), jnp.float32)


def train(arguments: argparse.Namespace, tx: Any) -> dict[str, Any]:
    """Trains a model with ``tx``, offloaded or plain, and returns the losses and the seconds of each step."""
    model = Model(arguments.width, arguments.blocks, nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    state = tx.init(params)
    plain_update = jax.jit(tx.update, donate_argnums=(0, 1)) if arguments.plain else None
    losses, seconds = [], []
    for step, (x, y) in enumerate(batches(arguments.steps, arguments.batch)):
        began = time.perf_counter()
        loss, grads = loss_and_grads(model, x, y)  # jitted
        if plain_update is not None:
            updates, state = plain_update(grads, state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, state = tx.apply(grads, state, params)  # outside of jit: here the state comes from SSD
        nnx.update(model, params)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        print(f"step {step} loss {losses[-1]:.6f} seconds {seconds[-1]:.2f}", flush=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"parameters": count, "losses": losses, "step_seconds_median": statistics.median(seconds)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the example and returns what it printed last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", type=Path, required=True, help="folder on an SSD; made, and removed at the end"
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--optimizer", choices=("adamw", "fused", "sgd"), default="adamw")
    parser.add_argument("--tile-elements", type=int, default=1 << 20)
    parser.add_argument("--plain", action="store_true", help="keep the state in memory, with plain optax")
    parser.add_argument("--direct-io", choices=("required", "optional"), default="required")
    arguments = parser.parse_args(argv)
    make = {"adamw": optax.adamw, "fused": memascend_jax.adamw, "sgd": optax.sgd}[arguments.optimizer]
    base = make(
        optax.warmup_cosine_decay_schedule(
            0.0, arguments.learning_rate, arguments.steps // 4, arguments.steps
        )
    )
    if arguments.plain:
        facts = train(arguments, base)
    else:
        capacity = 2 * 8 * (8 * arguments.blocks * arguments.width**2 + 1000 * arguments.width) + (16 << 20)
        arguments.store.mkdir(parents=True)
        try:
            with (
                memascend_jax.TensorStore.create(
                    arguments.store, capacity=capacity, direct_io=arguments.direct_io
                ) as store,
                memascend_jax.offload(base, store=store, tile_elements=arguments.tile_elements) as tx,
            ):
                facts = train(arguments, tx)
                facts |= {"where": tx.describe(), "slot_bytes": tx.host_bytes}
        finally:
            shutil.rmtree(arguments.store)
    facts["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(facts))
    return facts


if __name__ == "__main__":
    main()
