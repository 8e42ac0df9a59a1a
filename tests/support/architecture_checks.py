# SPDX-License-Identifier: Apache-2.0
"""Holds a tiny architecture to logits and gradients that transformers computed, then or now."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from staged_model import StagedModel
from tiny_architectures import DOCUMENTS, tiny_weight

from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import tensor_shapes

#: Both sides compute in float32, in another order and with other approximations of exp and cos.
LOGIT_TOLERANCE = 1e-4
#: Of the largest element of a tensor's gradient.
GRADIENT_TOLERANCE = 5e-5


def build(config):
    """Returns the staged model of a tiny config, in float32, with key blocks shorter than a window and a document."""
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    return build_from(config, {t.name: tiny_weight(t.name, t.shape, config) for t in shapes})


def build_from(config, tensors):
    """Returns the staged model of a ``config.json`` and its tensors by name."""
    stages = ModelStages(ModelConfig.from_hf(config), "float32", attention_chunk=4)
    return StagedModel(stages, {name: jnp.asarray(value) for name, value in tensors.items()}, plain=True)


def check_logits(model, batch, expected):
    """Of every document of the packed batch, as if it were alone; and of the long one by way of a cache."""
    got = model.logits(batch.tokens, batch.positions, batch.segments)
    for number, (row, first, length) in enumerate(DOCUMENTS):
        value = got[row, first : first + length]
        np.testing.assert_allclose(value, expected[f"document.{number}"], rtol=0, atol=LOGIT_TOLERANCE)
    # Steps shorter than a window, so that it reaches beyond what is new, and no multiple of it.
    decoded = model.decoded_logits(batch.tokens[:1], 4, slots=batch.tokens.shape[1])
    np.testing.assert_allclose(decoded[0], expected["document.0"], rtol=0, atol=LOGIT_TOLERANCE)


def check_gradients(model, batch, expected):
    """Of every tensor, by the loss over a vocabulary in tiles of which the last is padded."""
    arrays = (batch.tokens, batch.labels, batch.weights, batch.positions, batch.segments)
    _, grads = model.loss_and_grads(arrays, tile_rows=20, scale=1 / batch.weights.sum())
    assert grads.keys() == expected.keys()
    for name, value in expected.items():
        error = np.abs(grads[name] - value).max() / np.abs(value).max()
        assert error <= GRADIENT_TOLERANCE, f"{name}: relative error {error:.2e}"
