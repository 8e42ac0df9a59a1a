# SPDX-License-Identifier: Apache-2.0
"""A linear layer with an adapter: its product and its gradients, against the formula differentiated by jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memascend_jax.models.adapters import adapter_shapes, plan_adapters
from memascend_jax.models.lora import adapted_linear
from memascend_jax.models.matmul import linear, plan_precision
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import layer_shapes

SHAPE = ModelConfig.from_hf(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
ADAPTERS = plan_adapters(SHAPE, 4, alpha=6.0, rslora=False, targets=["all-linear"])
#: Of sums of some 50 products in float32, and of bfloat16 results.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def formula(x, weight, a, b, scale):
    product = jax.lax.Precision.HIGHEST
    low = jnp.matmul(x, a.T, precision=product)
    return jnp.matmul(x, weight.T, precision=product) + scale * jnp.matmul(low, b.T, precision=product)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_and_gradients_are_those_of_the_formula(dtype: str) -> None:
    precision = plan_precision(dtype)
    x, weight, a, b = normal(0, 2, 5, 24), normal(1, 16, 24), normal(2, 4, 24), normal(3, 16, 4)
    x, weight, a, b = (value.astype(dtype).astype(jnp.float32) for value in (x, weight, a, b))
    dy = normal(4, 2, 5, 16).astype(dtype)
    y, pull = jax.vjp(lambda *p: adapted_linear(*p, 1.5, precision), x.astype(dtype), weight, a, b)
    expected, pull_expected = jax.vjp(lambda *p: formula(*p, 1.5), x, weight, a, b)
    pairs = zip((y, *pull(dy)), (expected, *pull_expected(dy.astype(jnp.float32))), strict=True)
    for got, wanted in pairs:
        assert np.abs(np.asarray(got, np.float32) - wanted).max() < TOLERANCE[dtype] * np.abs(wanted).max()
    assert y.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_b_the_layer_computes_what_it_did(dtype: str) -> None:
    precision = plan_precision(dtype)
    x, weight, a = normal(0, 2, 5, 24).astype(dtype), normal(1, 16, 24), normal(2, 4, 24)
    zero = adapted_linear(x, weight, a, jnp.zeros((16, 4)), 1.5, precision)
    assert np.array_equal(zero, linear(x, weight, precision))


def layer_inputs():
    shapes = layer_shapes(SHAPE)
    params = {
        name: normal(number, *shape) * 0.2 + (len(shape) == 1)
        for number, (name, shape) in enumerate({**shapes, **adapter_shapes(shapes, ADAPTERS)}.items())
    }
    x, dy = normal(90, 2, 6, 32), normal(91, 2, 6, 32)
    positions = jnp.tile(jnp.arange(6, dtype=jnp.int32), (2, 1))
    return params, x, dy, positions, jnp.ones((2, 6), jnp.int32)


def test_a_layer_with_adapters_is_the_layer_with_merged_weights() -> None:
    params, x, dy, positions, segments = layer_inputs()
    adapted = ModelStages(SHAPE, "float32", adapters=ADAPTERS)
    plain = ModelStages(SHAPE, "float32")
    assert set(adapted.layer_names) == set(params)
    merged = {}
    for name in plain.layer_names:
        module = name.removesuffix(".weight")
        merged[name] = params[name]
        if f"{module}.lora_A.weight" in params:
            a, b = params[f"{module}.lora_A.weight"], params[f"{module}.lora_B.weight"]
            merged[name] += 1.5 * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
    y = jax.jit(adapted.layer)(params, x, positions, segments)
    expected = jax.jit(plain.layer)(merged, x, positions, segments)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    dx, grads = jax.jit(adapted.layer_backward)(params, x, dy, positions, segments)
    expected, of_weights = jax.jit(plain.layer_backward)(merged, x, dy, positions, segments)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-4)
    # dA = s Bᵀ dW and dB = s dW Aᵀ, with the merged weight's gradient dW.
    name = "mlp.up_proj"
    a, b = params[f"{name}.lora_A.weight"], params[f"{name}.lora_B.weight"]
    dw = of_weights[f"{name}.weight"]
    np.testing.assert_allclose(grads[f"{name}.lora_A.weight"], 1.5 * b.T @ dw, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(grads[f"{name}.lora_B.weight"], 1.5 * dw @ a.T, rtol=1e-3, atol=1e-3)


def test_only_what_is_trained_is_differentiated_and_costs_less() -> None:
    params, x, dy, positions, segments = layer_inputs()
    stages = ModelStages(SHAPE, "float32", adapters=ADAPTERS)
    factors = tuple(name for name in params if "lora" in name)
    arguments = (params, x, dy, positions, segments)

    def compiled(*trained):
        return jax.jit(lambda *p: stages.layer_backward(*p, *trained)).lower(*arguments).compile()

    whole, part = compiled(), compiled(factors)
    every, some = whole(*arguments)[1], part(*arguments)[1]
    assert set(some) == set(factors)
    for name in factors:
        np.testing.assert_allclose(some[name], every[name], rtol=1e-5, atol=1e-5)
    # The products of weights' gradients are a third of all that weights take, forward again and backward.
    products = (
        2 * 12 * sum(value.size for name, value in params.items() if "lora" not in name and value.ndim == 2)
    )
    spared = whole.cost_analysis()["flops"] - part.cost_analysis()["flops"]
    assert spared > 0.95 * products
