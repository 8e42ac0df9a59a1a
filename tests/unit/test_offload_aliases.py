# SPDX-License-Identifier: Apache-2.0
"""Every optimizer of optax: carried out bit for bit as optax does on each leaf, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from offloading import TILE, PerLeaf, assert_close, assert_same_bits, make_grads, make_params, make_store

import memascend_jax
from memascend_jax.optim.offload import CouplingError, offload

STEPS = 20
RATE = 1e-2
#: At a usual learning rate. XLA's own programs of one optimizer differ by about as much: one unit in the last place of
#: 0.999 ** t is a ten-thousandth of the first bias corrections.
FUSED_TOLERANCE = 1e-6
FUSED_RATE = 1e-3

#: What an optimizer needs besides a learning rate.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "fromage": lambda make: make(learning_rate=RATE),
    "noisy_sgd": lambda make: make(RATE, key=jax.random.key(0)),
    "reduce_on_plateau": lambda make: optax.chain(optax.sgd(RATE), make(patience=2)),
    "schedule_free": lambda make: make(optax.sgd(RATE), RATE),
    "mechanize": lambda make: make(optax.sgd(RATE)),
    "sam": lambda make: make(optax.sgd(RATE), optax.sgd(RATE), sync_period=3),
    "dpsgd": lambda make: make(RATE, 1.0, 1.0, seed=0),
    "differentially_private_aggregate": lambda make: make(1.0, 1.0, key=jax.random.key(0)),
    "split_real_and_imaginary": lambda make: make(optax.sgd(RATE)),
    "galore": lambda make: make(RATE, rank=4),
}
#: Those that take the loss, too.
NEEDS_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
#: The reason is what couples: the optimizer's own name where that is all that can be said.
REFUSED = {
    "dadapt_adamw": "estimates one step size from all gradients",
    "differentially_private_aggregate": "clips per-example gradients by their norm over all leaves",
    "dog": "estimates one step size from the distance that all leaves have gone",
    "dowg": "the same, weighted",
    "dpsgd": "clips per-example gradients by their norm over all leaves",
    "mechanize": "tunes one step size by the inner product over all leaves",
    "momo": "takes its step size from the loss and an inner product over all leaves",
    "momo_adam": "takes its step size from the loss and an inner product over all leaves",
    "normalize": "divides by the norm over all leaves",
    "polyak_sgd": "divides the loss by the squared norm over all leaves",
    "prodigy": "estimates one step size from all gradients",
}
#: Where the part that couples has a name of its own.
CULPRITS = {
    "dog": "scale_by_dog",
    "dowg": "scale_by_dowg",
    "dpsgd": "differentially_private_aggregate",
    "polyak_sgd": "scale_by_polyak",
}
#: Not optimizers that a gradient alone can step: they call the loss function themselves.
CALL_THE_LOSS = {"lbfgs", "sophia"}
#: optax itself fails on a scalar parameter.
NO_SCALAR = {"sm3"}
#: A leaf by itself draws other random numbers than in its tree.
RANDOM = {"noisy_sgd"}


def _optimizers() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in (optax._src.alias, optax.contrib):
        for name, made in inspect.getmembers(module, inspect.isfunction):
            signature = inspect.signature(made)
            result = str(signature.return_annotation)
            # Some have no annotation.
            builds = "GradientTransformation" in result or "learning_rate" in signature.parameters
            if builds and not name.startswith(("_", "scale_by")) and not name.endswith("_params"):
                yield name, made


OPTIMIZERS = dict(_optimizers())
SEPARABLE = sorted(set(OPTIMIZERS) - set(REFUSED) - CALL_THE_LOSS)


def _made(name: str) -> Any:
    make = OPTIMIZERS[name]
    if name in ARGUMENTS:
        return ARGUMENTS[name](make)
    needed = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return make(**dict.fromkeys(needed, RATE))


def test_every_optimizer_of_optax_is_sorted() -> None:
    assert set(REFUSED) | CALL_THE_LOSS | set(ARGUMENTS) <= set(OPTIMIZERS)
    assert len(SEPARABLE) >= 30
    assert {"adam", "adamw", "lion", "sgd", "adafactor", "muon", "lamb", "lars", "sm3"} <= set(SEPARABLE)


@pytest.mark.parametrize("name", SEPARABLE)
def test_updates_are_those_of_optax_on_each_leaf_bit_for_bit(name: str, tmp_path: Path) -> None:
    base = _made(name)
    params = make_params(scalar=name not in NO_SCALAR)
    extra = {"value": 1.0} if name in NEEDS_VALUE else {}
    reference = PerLeaf(base, params)
    whole = base.init(params)
    with (
        make_store(tmp_path) as store,
        offload(base, store=store, tile_elements=TILE, extra_args=extra) as tx,
    ):
        state = tx.init(params)
        for step in range(STEPS):
            grads = make_grads(params, step)
            updates, state = tx.update(grads, state, params, **extra)
            if name in RANDOM:
                expected, whole = jax.jit(base.update)(grads, whole, params, **extra)
                assert_close(updates, expected, FUSED_TOLERANCE)
            else:
                assert_same_bits(updates, reference.step(grads, params, **extra))
            params = optax.apply_updates(params, updates)
        assert int(state.version) == STEPS


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_couples_leaves_is_refused_by_name(name: str, tmp_path: Path) -> None:
    extra = {"value": 1.0} if name in NEEDS_VALUE else {}
    with make_store(tmp_path) as store:
        with pytest.raises(CouplingError) as caught:
            offload(_made(name), store=store, extra_args=extra).init(make_params())
        assert store.names() == []
    assert caught.value.culprit == CULPRITS.get(name, name)
    assert caught.value.culprit in str(caught.value)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor", "lamb", "schedule_free_adamw"])
def test_apply_gives_what_update_and_apply_updates_give_in_one_jit(name: str, tmp_path: Path) -> None:
    base, params = _made(name), make_params()
    reference = PerLeaf(base, params, applies=True)
    with make_store(tmp_path) as store, offload(base, store=store, tile_elements=TILE) as tx:
        state = tx.init(params)
        for step in range(STEPS):
            grads = make_grads(params, step)
            expected = reference.step(grads, params)
            params, state = tx.apply(grads, state, params)
            assert_same_bits(params, expected)


FUSED = {
    "adamw": lambda module: module.adamw(FUSED_RATE, weight_decay=0.1),
    "adamw_masked": lambda module: module.adamw(
        FUSED_RATE, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "adamw_nesterov": lambda module: module.adamw(FUSED_RATE, nesterov=True),
    "adamw_schedule": lambda module: module.adamw(optax.linear_schedule(FUSED_RATE, 0.0, 15)),
    "adam": lambda module: module.adam(FUSED_RATE),
    "lion": lambda module: module.lion(FUSED_RATE, weight_decay=0.1),
    "sgd": lambda module: module.sgd(FUSED_RATE),
    "sgd_momentum": lambda module: module.sgd(FUSED_RATE, momentum=0.9),
    "sgd_nesterov": lambda module: module.sgd(FUSED_RATE, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("applies", [False, True], ids=["update", "apply"])
@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_kernels_follow_optax(name: str, applies: bool, tmp_path: Path) -> None:
    params = expected = make_params()
    reference = PerLeaf(FUSED[name](optax), params)
    with make_store(tmp_path) as store:
        tx = offload(FUSED[name](memascend_jax), store=store, tile_elements=TILE)
        state = tx.init(params)
        assert "2 by fused kernels" in tx.describe()
        for step in range(STEPS):
            grads = make_grads(params, step)
            expected = optax.apply_updates(expected, reference.step(grads, expected))
            if applies:
                params, state = tx.apply(grads, state, params)
            else:
                found, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, found)
            assert_close(params, expected, FUSED_TOLERANCE)
        for path, arrays in _moments(reference.states).items():
            kept = state.state_of(path)
            for moment, values in arrays.items():
                assert_close(kept[moment], values, FUSED_TOLERANCE)
        tx.close()


def _moments(states: Any) -> dict[str, dict[str, np.ndarray]]:
    """Returns optax's moments of the two leaves that are arrays."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(states)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for leaf in ("layer/kernel", "layer/bias"):
            if name.endswith(f"/{leaf}"):
                found.setdefault(leaf, {})[name.removesuffix(f"/{leaf}").rpartition("/")[2]] = np.asarray(
                    value
                )
    return found
