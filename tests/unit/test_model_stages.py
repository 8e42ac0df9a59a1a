# SPDX-License-Identifier: Apache-2.0
"""The stage functions, run forward and backward as training does, against ``jax.grad`` of a plain model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import llama_oracle
import numpy as np
import pytest
from staged_model import StagedModel

from memascend_jax.errors import MachineError
from memascend_jax.models import losses
from memascend_jax.models.matmul import Precision, plan_precision
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import layer_shapes, layer_tensor_name, tensor_shapes

BATCH, SEQ = 2, 12

#: Relative to the largest element: both sides sum float32 products, in another order.
F32_TOLERANCE = 1e-5


def example(config, seed=0):
    """Two packed rows: three segments, positions that restart with each, padding at the end of one."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (BATCH, SEQ), dtype=np.int32)
    labels = rng.integers(0, config.vocab_size, (BATCH, SEQ), dtype=np.int32)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 7 + [2] * 5], np.int32)
    positions = np.array([[*range(5), *range(4), 0, 0, 0], [*range(7), *range(5)]], np.int32)
    weights = (rng.random((BATCH, SEQ)) < 0.7).astype(np.float32) * (segments > 0)
    return tokens, labels, weights, positions, segments


def stage_loss_and_grads(stages, params, batch, **how):
    return StagedModel(stages, params).loss_and_grads(batch, **how)


def assert_close(got, expected, name=""):
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=F32_TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize(
    ("tied", "tile_rows"),
    [(True, 50), (True, 16), (False, 25)],
    ids=["tied_one_tile", "tied_padded_tile", "untied_even_tiles"],
)
def test_every_gradient_equals_that_of_the_plain_model(tied, tile_rows, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * tile_rows * 17)  # two chunks of tokens, the last padded
    config = llama_oracle.tiny_config(tied=tied)
    params, batch = llama_oracle.random_params(config), example(config)
    stages = ModelStages(config, "float32", attention_chunk=4)
    loss, grads = stage_loss_and_grads(stages, params, batch, tile_rows=tile_rows, scale=0.25)

    def objective(p):
        return 0.25 * llama_oracle.plain_loss(config, p, *batch)

    expected_loss, expected = jax.jit(jax.value_and_grad(objective))(params)
    np.testing.assert_allclose(0.25 * loss, expected_loss, rtol=1e-6)
    assert grads.keys() == expected.keys() == {tensor.name for tensor in tensor_shapes(config)}
    for name, value in expected.items():
        assert grads[name].dtype == jnp.float32
        assert_close(grads[name], value, name)


def test_bfloat16_gradients_are_float32_and_near_those_of_float32():
    config = llama_oracle.tiny_config(tied=True)
    params, batch = llama_oracle.random_params(config), example(config)
    stored = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    stages = ModelStages(config, "bfloat16", attention_chunk=4)
    loss, grads = stage_loss_and_grads(stages, stored, batch, tile_rows=25, scale=1.0)
    exact = {name: value.astype(jnp.float32) for name, value in stored.items()}
    plain = jax.jit(jax.value_and_grad(lambda p: llama_oracle.plain_loss(config, p, *batch)))
    expected_loss, expected = plain(exact)
    np.testing.assert_allclose(loss, expected_loss, rtol=0.01)
    for name, value in expected.items():
        assert grads[name].dtype == jnp.float32
        error = jnp.linalg.norm(grads[name] - value) / jnp.linalg.norm(value)
        assert error < 0.05, f"{name}: relative error {error}"
        assert not np.array_equal(grads[name], grads[name].astype(jnp.bfloat16)), f"{name} was rounded"


def layer_example(dtype, seed=1):
    """One layer's parameters, an input, a gradient of the output, positions and segments."""
    config = llama_oracle.tiny_config(tied=True)
    params = llama_oracle.random_params(config)
    local = {name: params[layer_tensor_name(0, name)].astype(dtype) for name in layer_shapes(config)}
    *_, positions, segments = example(config)
    keys = jax.random.split(jax.random.key(seed))
    x, dy = (jax.random.normal(key, (BATCH, SEQ, config.hidden_size)) for key in keys)
    return config, local, x, dy, positions, segments


@pytest.mark.parametrize(
    "way", [{"upcast_operands": True}, {"upcast_operands": False, "contract_last": True}]
)
@pytest.mark.parametrize("stored_dtype", [jnp.bfloat16, jnp.float32])
def test_every_way_to_multiply_rounds_as_bfloat16_operands_do(stored_dtype, way):
    config, local, x, dy, positions, segments = layer_example(stored_dtype)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    results = []
    for chosen in ({"upcast_operands": False}, way):
        stages = ModelStages(config, "bfloat16", precision=Precision(jnp.dtype(jnp.bfloat16), **chosen))
        results.append(jax.jit(stages.layer_backward)(local, x, dy, positions, segments))
    (_, grads), (_, other) = results
    for name, value in grads.items():
        # Only the order of the float32 sums differs; now and then that flips one bfloat16 rounding.
        error = jnp.linalg.norm(other[name] - value) / jnp.linalg.norm(value)
        assert error < 1e-3, f"{name}: relative error {error}"


@pytest.mark.parametrize("upcast", [False, True])
def test_compiling_drops_no_rounding(upcast):
    config, local, x, _, positions, segments = layer_example(jnp.bfloat16)
    stages = ModelStages(config, "bfloat16", precision=Precision(jnp.dtype(jnp.bfloat16), upcast))
    args = (local, x.astype(jnp.bfloat16), positions, segments)
    np.testing.assert_array_equal(jax.jit(stages.layer)(*args), stages.layer(*args))


@pytest.mark.parametrize(
    ("shape", "other", "dims", "contracted"),
    [
        ((2, 6, 8), (2, 6, 5), (((0, 1), (0, 1)), ((), ())), (1, 2)),
        ((2, 3, 6, 64), (2, 3, 6, 5), (((2,), (2,)), ((0, 1), (0, 1))), (3,)),
        ((6, 130), (6, 5), (((0,), (0,)), ((), ())), (1,)),
        # Seven is no multiple of anything that it could be cut into.
        ((6, 7), (6, 5), (((0,), (0,)), ((), ())), (0,)),
        ((6, 8), (8, 5), (((1,), (0,)), ((), ())), (1,)),
    ],
)
def test_an_operand_that_is_turned_gives_the_same_product(shape, other, dims, contracted):
    a, b = (jax.random.normal(jax.random.key(size[-1]), size) for size in (shape, other))
    ways = [Precision(jnp.dtype(jnp.float32), False, turn) for turn in (False, True)]
    plain, turned = (way.dot(a, b, dims) for way in ways)
    assert_close(turned, plain)
    (product,) = (
        step
        for step in jax.make_jaxpr(lambda a, b: ways[1].dot(a, b, dims))(a, b).eqns
        if step.primitive.name == "dot_general"
    )
    assert product.params["dimension_numbers"][0][0] == contracted


def test_operands_are_turned_where_the_processor_multiplies_bfloat16():
    precision = plan_precision("bfloat16", "cpu")
    assert precision.contract_last != precision.upcast_operands
    assert not plan_precision("bfloat16", "gpu").contract_last
    assert not plan_precision("float32", "cpu").contract_last


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_layer_does_not_depend_on_the_attention_chunk(chunk):
    config, local, x, _, positions, segments = layer_example(jnp.float32)
    got = jax.jit(ModelStages(config, "float32", attention_chunk=chunk).layer)(local, x, positions, segments)
    assert_close(got, llama_oracle.plain_layer(config, local, x, positions, segments))


def test_layers_of_one_shape_share_an_executable():
    config = llama_oracle.tiny_config(tied=True)
    params = llama_oracle.random_params(config)
    *_, positions, segments = example(config)
    stages = ModelStages(config, "float32")
    traces = []
    step = jax.jit(lambda *args: traces.append(1) or stages.layer(*args))
    x = jnp.ones((BATCH, SEQ, config.hidden_size))
    for index in range(config.num_hidden_layers):
        x = step({n: params[layer_tensor_name(index, n)] for n in stages.layer_names}, x, positions, segments)
    assert traces == [1]


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(MachineError, match=r"'float64'.*expected 'bfloat16', 'float16' or 'float32'"):
        plan_precision("float64")
