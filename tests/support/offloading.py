# SPDX-License-Identifier: Apache-2.0
"""What the tests of offloaded transforms share: parameters, gradients, a store, plain optax leaf by leaf."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from stores import ANY_DISK

from memascend_jax import TensorStore

#: The smallest tile: the matrix below is two of them and a tail.
TILE = 4096


def make_params(*, scalar: bool = True, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Returns a nested pytree: a matrix of several tiles, a bias, and a scalar."""
    rng = np.random.default_rng(0)
    params = {
        "layer": {
            "kernel": jnp.asarray(rng.normal(size=(130, 70)), dtype),
            "bias": jnp.asarray(rng.normal(size=(70,)), dtype),
        }
    }
    return {**params, "scale": jnp.asarray(1.5, dtype)} if scalar else params


def make_grads(params: Any, step: int, size: float = 0.1) -> Any:
    """Returns gradients like ``params``, others for each step."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(100 + step)
    return tree.unflatten(
        [jnp.asarray(size * rng.normal(size=np.shape(leaf)), jnp.asarray(leaf).dtype) for leaf in leaves]
    )


@contextlib.contextmanager
def make_store(folder: Path, **options: Any) -> Iterator[TensorStore]:
    """Yields a new store with room for any state in the tests."""
    folder.mkdir(exist_ok=True)
    with TensorStore.create(folder, capacity="64MiB", **{**ANY_DISK, **options}) as store:
        yield store


def alone(tree: Any, path: Any) -> Any:
    """Returns the pytree of nested dicts with the leaf at ``path`` and no other."""
    leaf = tree
    for key in path:
        leaf = leaf[key.key]
    for key in reversed(path):
        leaf = {key.key: leaf}
    return leaf


class PerLeaf:
    """Plain optax under jit on each leaf by itself."""

    def __init__(self, tx: Any, params: Any, *, applies: bool = False) -> None:
        self._paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        self._tree = jax.tree.structure(params)
        self.states = [tx.init(alone(params, path)) for path in self._paths]

        def apply(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(apply if applies else tx.update)

    def step(self, grads: Any, params: Any, **extra: Any) -> Any:
        """Returns the updates, or with ``applies`` the new parameters."""
        results = []
        for index, path in enumerate(self._paths):
            result, self.states[index] = self._step(
                alone(grads, path), self.states[index], alone(params, path), **extra
            )
            results += jax.tree.leaves(result)
        return self._tree.unflatten(results)


def assert_same_bits(got: Any, expected: Any) -> None:
    """Fails unless both pytrees have the same structure, types and bits (nan equals nan)."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True)
    for (path, one), other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=jax.tree_util.keystr(path))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Fails unless the leaves differ by at most ``tolerance``."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max(initial=0) <= tolerance
