# SPDX-License-Identifier: Apache-2.0
"""Random weights: Hugging Face's distribution, the same however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoints import hf_config

from memascend_jax.checkpoints.random_init import BLOCK, random_pieces
from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME, layer_tensor_name

CONFIG = ModelConfig.from_hf(hf_config(vocab_size=1100))


def whole(name, seed=0, **kwargs):
    return np.concatenate([piece for _, piece in random_pieces(CONFIG, name, seed, **kwargs)])


def test_values_do_not_depend_on_the_size_of_the_pieces():
    expected = whole(EMBED_NAME)
    assert expected.size == 1100 * 256 and expected.dtype == np.float32
    for max_bytes in (1, 4 * BLOCK, 12 * BLOCK + 3):
        pieces = list(random_pieces(CONFIG, EMBED_NAME, 0, max_bytes))
        assert [start for start, _ in pieces] == list(np.cumsum([0, *(p.size for _, p in pieces[:-1])]))
        np.testing.assert_array_equal(np.concatenate([piece for _, piece in pieces]), expected)


def test_matrices_are_normal_and_norms_are_one():
    values = whole(EMBED_NAME)
    # Five standard errors of the mean and of the deviation of 281,600 values.
    assert abs(values.mean()) < 5 * 0.02 / values.size**0.5
    assert abs(values.std() - 0.02) < 5 * 0.02 / (2 * values.size) ** 0.5
    assert np.all(whole(NORM_NAME) == 1.0)


def test_blocks_tensors_and_seeds_have_streams_of_their_own():
    values = whole(EMBED_NAME)
    assert not np.any(values[:BLOCK] == values[BLOCK : 2 * BLOCK])
    q, k = (whole(layer_tensor_name(0, f"self_attn.{name}_proj.weight")) for name in "qk")
    assert not np.any(q[: k.size] == k)
    assert not np.any(whole(EMBED_NAME, seed=1) == values)


def test_an_unknown_tensor_is_named():
    with pytest.raises(DataError, match=r"'lm_head\.weight'"):
        list(random_pieces(CONFIG, "lm_head.weight", 0))
