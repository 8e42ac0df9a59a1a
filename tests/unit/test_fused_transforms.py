# SPDX-License-Identifier: Apache-2.0
"""adamw, adam, lion and sgd: optax's own wherever optax is used, and the same numbers from the fused kernels."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import memascend_jax
from memascend_jax._native import _core
from memascend_jax.optim.fused import FusedTile, FusedUpdate, update_fused_tile
from memascend_jax.optim.transforms import fused_description

#: Of weights up to 4, after 20 steps; measured at most 4.8e-7 (nesterov).
OPTAX_ATOL = 1e-6
STEPS = 20

SCHEDULE = optax.schedules.cosine_decay_schedule(1e-2, 30)
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("adamw", {"learning_rate": 1e-2, "weight_decay": 0.1}),
    "adamw schedule": ("adamw", {"learning_rate": SCHEDULE, "weight_decay": 0.1, "eps_root": 1e-6}),
    "adamw decay schedule": (
        "adamw",
        {"learning_rate": 1e-2, "weight_decay": lambda count: 0.1 / (1.0 + count)},
    ),
    "adamw nesterov": ("adamw", {"learning_rate": 1e-2, "b1": 0.8, "nesterov": True}),
    "adam": ("adam", {"learning_rate": 1e-2, "b2": 0.95}),
    "lion": ("lion", {"learning_rate": 1e-3, "weight_decay": 0.1}),
    "sgd": ("sgd", {"learning_rate": 1e-2}),
    "momentum": ("sgd", {"learning_rate": 1e-2, "momentum": 0.9}),
    "nesterov": ("sgd", {"learning_rate": SCHEDULE, "momentum": 0.9, "nesterov": True}),
}


def _kernel_steps(update: FusedUpdate, start: np.ndarray, grads: np.ndarray, dtype: str) -> np.ndarray:
    param = start.copy()
    state = {leaf: np.zeros_like(start) for leaf in update.state_leaves}
    for step, grad in enumerate(grads, start=1):
        moments = [array.ctypes.data for array in state.values()]
        mu, nu = (moments + [0, 0])[:2]
        tile = FusedTile(param.ctypes.data, grad.ctypes.data, param.size, mu, nu, grad_dtype=dtype)
        update_fused_tile(update, update.numbers(step), tile)
    return param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_of_the_kernel_are_those_of_optax(case: str, dtype: str) -> None:
    name, arguments = CASES[case]
    element = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    rng = np.random.default_rng(0)
    start = rng.standard_normal(1031).astype(np.float32)
    grads = rng.standard_normal((STEPS, start.size)).astype(element)
    plain = getattr(optax, name)(**arguments)
    params = jnp.asarray(start)
    state = plain.init(params)
    for grad in grads:
        updates, state = plain.update(jnp.asarray(grad.astype(np.float32)), state, params)
        params = optax.apply_updates(params, updates)
    update = fused_description(getattr(memascend_jax, name)(**arguments))
    assert update is not None
    got = _kernel_steps(update, start, grads, dtype)
    assert np.abs(got - start).max() > 1e-3
    np.testing.assert_allclose(got, np.asarray(params), rtol=0, atol=OPTAX_ATOL)


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd"])
def test_arguments_and_defaults_are_those_of_optax(name: str) -> None:
    def facts(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert facts(getattr(memascend_jax, name)) == facts(getattr(optax, name))


@pytest.mark.parametrize("case", CASES)
def test_the_transform_itself_is_the_one_of_optax(case: str) -> None:
    name, arguments = CASES[case]
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda x: x * 0.1 + 1, params)
    results = []
    for module in (optax, memascend_jax):
        tx = optax.chain(optax.clip_by_global_norm(1.0), getattr(module, name)(**arguments))
        state = tx.init(params)
        update = jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(grads, state, params)
        results.append((updates, state))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_what_a_kernel_cannot_do_is_plain_optax() -> None:
    tx = memascend_jax.adamw(1e-3, mu_dtype=jnp.bfloat16)
    assert fused_description(tx) is None
    assert tx.init(jnp.ones(3))[0].mu.dtype == jnp.bfloat16
    assert fused_description(memascend_jax.lion(1e-3, mu_dtype=jnp.bfloat16)) is None
    assert fused_description(memascend_jax.sgd(1e-3, 0.9, accumulator_dtype=jnp.bfloat16)) is None
    assert fused_description(optax.adamw(1e-3)) is None
    injected = optax.inject_hyperparams(memascend_jax.adamw)(learning_rate=1e-3)
    assert fused_description(injected) is None
    state = injected.init(jnp.ones(3))
    updates, _ = jax.jit(injected.update)(jnp.ones(3), state, jnp.ones(3))
    plain = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    expected, _ = jax.jit(plain.update)(jnp.ones(3), plain.init(jnp.ones(3)), jnp.ones(3))
    np.testing.assert_array_equal(updates, expected)


def test_numbers_of_numpy_and_jax_are_numbers() -> None:
    update = fused_description(memascend_jax.adamw(jnp.float32(1e-3), b1=np.float64(0.8), weight_decay=0))
    assert update is not None
    assert update.b1 == 0.8
    assert update.learning_rate == pytest.approx(1e-3)
    assert update.state_leaves == ("mu", "nu")
    plain = fused_description(memascend_jax.sgd(1e-3, nesterov=True))
    assert plain is not None
    assert (plain.kernel, plain.state_leaves) == ("sgd", ())


def test_a_schedule_that_returns_nan_is_named() -> None:
    update = fused_description(memascend_jax.adamw(lambda count: jnp.where(count < 2, 1e-3, jnp.nan)))
    assert update is not None
    assert update.numbers(2).learning_rate == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="learning rate of update 3 is nan"):
        update.numbers(3)


def test_an_unknown_kernel_and_missing_moments_are_refused() -> None:
    values = np.ones(4, np.float32)
    arguments: dict[str, Any] = {
        "param": values.ctypes.data,
        "grad": values.ctypes.data,
        "n": 4,
        "grad_dtype": "float32",
        "lr": 0.1,
    }
    with pytest.raises(ValueError, match="known are adam"):
        _core.fused_update(kernel="adamax", **arguments)
    with pytest.raises(ValueError, match="mu is address 0"):
        _core.fused_update(kernel="lion", **arguments)
    with pytest.raises(ValueError, match="nu is address 0"):
        _core.fused_update(kernel="adam", mu=values.ctypes.data, **arguments)


def test_importing_the_package_does_not_import_jax() -> None:
    code = "import sys, memascend_jax; dir(memascend_jax); sys.exit('jax' in sys.modules or 'optax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
