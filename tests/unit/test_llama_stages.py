# SPDX-License-Identifier: Apache-2.0
"""The stage functions, run forward and backward as training does, against ``jax.grad`` of a plain model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import llama_oracle
import numpy as np
import pytest

from memascend_jax.errors import MachineError
from memascend_jax.models import losses
from memascend_jax.models.llama import LlamaStages
from memascend_jax.models.matmul import Precision, plan_precision
from memascend_jax.models.shapes import head_weight_name, layer_shapes, layer_tensor_name, tensor_shapes

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


class Jitted:
    """The stages as training calls them: each function jitted once."""

    def __init__(self, stages):
        self.config, self.layer_names, self.head_carry = stages.config, stages.layer_names, stages.head_carry
        for name in (
            *("embed", "embed_backward", "layer", "layer_backward", "head_norm"),
            *("head_logsumexp", "head_loss", "head_backward", "head_finish"),
        ):
            setattr(self, name, jax.jit(getattr(stages, name)))


def stage_loss_and_grads(stages, params, batch, *, tile_rows, scale):
    """What training does, without storage: every stage forward, then every stage backward."""
    stages, config = Jitted(stages), stages.config
    tokens, labels, weights, positions, segments = (jnp.asarray(part) for part in batch)
    table = params["model.embed_tokens.weight"]
    rows, inverse = np.unique(np.asarray(tokens), return_inverse=True)
    inverse = inverse.reshape(tokens.shape).astype(np.int32)
    layers = [
        {name: params[layer_tensor_name(i, name)] for name in stages.layer_names}
        for i in range(config.num_hidden_layers)
    ]
    inputs = [stages.embed(table[rows], inverse)]
    for layer in layers:
        inputs.append(stages.layer(layer, inputs[-1], positions, segments))
    last = inputs.pop()

    head = params[head_weight_name(config)]
    xn = stages.head_norm(params["model.norm.weight"], last)
    carry = stages.head_carry(BATCH, SEQ)
    starts = list(range(0, config.vocab_size, tile_rows))
    for start in starts:
        carry = stages.head_logsumexp(
            carry, padded_tile(head, start, tile_rows), xn, labels, jnp.int32(start)
        )
    loss = stages.head_loss(carry, weights)

    dxn = jnp.zeros(xn.shape, jnp.float32)
    dhead = []
    for start in starts:
        tile = padded_tile(head, start, tile_rows)
        dxn, dtile = stages.head_backward(
            tile, xn, labels, weights, carry, jnp.float32(scale), jnp.int32(start), dxn
        )
        dhead.append(dtile)
    dhead = jnp.concatenate(dhead)
    assert not np.any(dhead[config.vocab_size :]), "rows that pad the last tile must have no gradient"
    dx, dnorm = stages.head_finish(params["model.norm.weight"], last, dxn)
    grads = {"model.norm.weight": dnorm, head_weight_name(config): dhead[: config.vocab_size]}
    for index in reversed(range(config.num_hidden_layers)):
        dx, layer_grads = stages.layer_backward(layers[index], inputs[index], dx, positions, segments)
        grads |= {layer_tensor_name(index, name): value for name, value in layer_grads.items()}
    drows = stages.embed_backward(dx, inverse, jnp.zeros((len(rows), config.hidden_size), jnp.float32))
    dtable = jnp.zeros(table.shape, jnp.float32).at[rows].add(drows)
    grads["model.embed_tokens.weight"] = dtable + grads.get("model.embed_tokens.weight", 0.0)
    return loss, grads


def padded_tile(head, start, tile_rows):
    """The tile with nan beyond the vocabulary, as stale memory may hold."""
    tile = head[start : start + tile_rows]
    return jnp.pad(tile, ((0, tile_rows - tile.shape[0]), (0, 0)), constant_values=jnp.nan)


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
    stages = LlamaStages(config, "float32", attention_chunk=4)
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
    stages = LlamaStages(config, "bfloat16", attention_chunk=4)
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
        stages = LlamaStages(config, "bfloat16", precision=Precision(jnp.dtype(jnp.bfloat16), **chosen))
        results.append(jax.jit(stages.layer_backward)(local, x, dy, positions, segments))
    (_, grads), (_, other) = results
    for name, value in grads.items():
        # Only the order of the float32 sums differs; now and then that flips one bfloat16 rounding.
        error = jnp.linalg.norm(other[name] - value) / jnp.linalg.norm(value)
        assert error < 1e-3, f"{name}: relative error {error}"


@pytest.mark.parametrize("upcast", [False, True])
def test_compiling_drops_no_rounding(upcast):
    config, local, x, _, positions, segments = layer_example(jnp.bfloat16)
    stages = LlamaStages(config, "bfloat16", precision=Precision(jnp.dtype(jnp.bfloat16), upcast))
    args = (local, x.astype(jnp.bfloat16), positions, segments)
    np.testing.assert_array_equal(jax.jit(stages.layer)(*args), stages.layer(*args))


@pytest.mark.parametrize(
    ("shape", "other", "dims"),
    [
        ((2, 6, 8), (2, 6, 5), (((0, 1), (0, 1)), ((), ()))),
        ((2, 3, 6, 64), (2, 3, 6, 5), (((2,), (2,)), ((0, 1), (0, 1)))),
        ((6, 130), (6, 5), (((0,), (0,)), ((), ()))),
        ((6, 7), (6, 5), (((0,), (0,)), ((), ()))),
        ((6, 8), (8, 5), (((1,), (0,)), ((), ()))),
    ],
)
def test_an_operand_that_is_turned_gives_the_same_product(shape, other, dims):
    a, b = (jax.random.normal(jax.random.key(size[-1]), size) for size in (shape, other))
    plain, turned = (Precision(jnp.dtype(jnp.float32), False, turn).dot(a, b, dims) for turn in (False, True))
    assert_close(turned, plain)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_layer_does_not_depend_on_the_attention_chunk(chunk):
    config, local, x, _, positions, segments = layer_example(jnp.float32)
    got = jax.jit(LlamaStages(config, "float32", attention_chunk=chunk).layer)(local, x, positions, segments)
    assert_close(got, llama_oracle.plain_layer(config, local, x, positions, segments))


def test_layers_of_one_shape_share_an_executable():
    config = llama_oracle.tiny_config(tied=True)
    params = llama_oracle.random_params(config)
    *_, positions, segments = example(config)
    stages = LlamaStages(config, "float32")
    traces = []
    step = jax.jit(lambda *args: traces.append(1) or stages.layer(*args))
    x = jnp.ones((BATCH, SEQ, config.hidden_size))
    for index in range(config.num_hidden_layers):
        x = step({n: params[layer_tensor_name(index, n)] for n in stages.layer_names}, x, positions, segments)
    assert traces == [1]


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(MachineError, match=r"'float64'.*expected 'bfloat16', 'float16' or 'float32'"):
        plan_precision("float64")
