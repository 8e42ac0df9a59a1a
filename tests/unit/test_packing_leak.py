# SPDX-License-Identifier: Apache-2.0
"""A packed document has the logits that it has alone: nothing of its neighbours reaches it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memascend_jax.data.examples import Encoded, ExampleBuilder
from memascend_jax.data.packing import Microbatch, pack
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import head_weight_name, layer_tensor_name, tensor_shapes

SEQ_LEN = 48
LENGTHS = (17, 9, 24, 5, 40, 30, 12, 2)
#: The issue's bound, in float32; the same sums in another order differ by 1e-6.
TOLERANCE = 1e-5
CONFIG = ModelConfig.from_hf(
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQ_LEN,
    }
)


STAGES = ModelStages(CONFIG, "float32")
LAYER = jax.jit(STAGES.layer)


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        tensor.name: jnp.asarray(rng.standard_normal(tensor.shape) * 0.3, jnp.float32)
        for tensor in tensor_shapes(CONFIG)
    }


def logits(params: dict[str, jax.Array], batch: Microbatch) -> np.ndarray:
    x = params["model.embed_tokens.weight"][batch.tokens]
    for index in range(CONFIG.num_hidden_layers):
        layer = {name: params[layer_tensor_name(index, name)] for name in STAGES.layer_names}
        x = LAYER(layer, x, batch.positions, batch.segments)
    return np.asarray(
        STAGES.head_norm(params["model.norm.weight"], x) @ params[head_weight_name(CONFIG)].T, np.float32
    )


def by_document(batch: Microbatch, values: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """The values of each document, by its tokens."""
    found = {}
    for row in range(len(batch.tokens)):
        for segment in range(1, batch.segments[row].max() + 1):
            places = batch.segments[row] == segment
            found[tuple(batch.tokens[row][places].tolist())] = values[row][places]
    return found


def test_logits_of_a_packed_document_are_those_of_the_document_alone(params: dict[str, jax.Array]) -> None:
    rng, builder = np.random.default_rng(1), ExampleBuilder()
    for length in LENGTHS:
        tokens = rng.integers(1, CONFIG.vocab_size, length + 1).astype(np.int32)
        builder.add(Encoded(tokens, np.ones(length + 1, np.bool_)))
    examples = builder.finish()
    results = []
    for together in (True, False):
        packed = pack(examples, range(len(LENGTHS)), SEQ_LEN, pad_id=0, seed=0, together=together)
        assert (len(packed) < len(LENGTHS)) == together
        batch = packed.batch(range(len(packed)))
        results.append(by_document(batch, logits(params, batch)))
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) == len(LENGTHS)
    for tokens, packed_logits in results[0].items():
        assert np.abs(packed_logits - results[1][tokens]).max() < TOLERANCE


def test_a_neighbour_changes_no_bit(params: dict[str, jax.Array]) -> None:
    builder = ExampleBuilder()
    builder.add(Encoded(np.arange(1, 20, dtype=np.int32), np.ones(19, np.bool_)))
    builder.add(Encoded(np.arange(20, 45, dtype=np.int32), np.ones(25, np.bool_)))
    batch = pack(builder.finish(), [0, 1], SEQ_LEN, pad_id=0, seed=0).batch([0])
    other = Microbatch(batch.tokens.copy(), batch.labels, batch.weights, batch.segments, batch.positions)
    other.tokens[batch.segments == 1] = 63
    second = batch.segments[0] == 2
    assert (logits(params, batch)[0, second] == logits(params, other)[0, second]).all()
