# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache of keys and values against full forward passes of the plain model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import llama_oracle
import numpy as np
import pytest

from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import NORM_NAME, head_weight_name, layer_tensor_name

#: Prompts of different lengths, padded on the right to the longest.
LENGTHS = np.array([3, 7, 5], np.int32)
NEW_TOKENS, SLOTS, TILE_ROWS = 6, 16, 16


@pytest.fixture(scope="module")
def decoder():
    return Decoder(llama_oracle.tiny_config(tied=False))


class Decoder:
    """Streams the layers of a tiny model over a batch, as generation does."""

    def __init__(self, config):
        self.config, self.params = config, llama_oracle.random_params(config)
        self.stages = ModelStages(config, "float32")
        positions, one_segment = np.arange(SLOTS)[None], np.ones((1, SLOTS), np.int32)
        self._plain = jax.jit(
            lambda tokens: llama_oracle.plain_logits(config, self.params, tokens, positions, one_segment)
        )
        self.norm = jax.jit(self.stages.head_norm)
        self.layer, self.argmax = jax.jit(self.stages.layer_cached), jax.jit(self.stages.head_argmax)

    def caches(self, batch, fill=0.0):
        shape = (batch, SLOTS, self.config.num_key_value_heads, self.config.head_dim)
        return [(jnp.full(shape, fill), jnp.full(shape, fill)) for _ in range(self.config.num_hidden_layers)]

    def forward(self, tokens, caches, start):
        x = self.params["model.embed_tokens.weight"][tokens]
        for index in range(self.config.num_hidden_layers):
            local = {n: self.params[layer_tensor_name(index, n)] for n in self.stages.layer_names}
            x, *caches[index] = self.layer(local, x, *caches[index], start)
        return x

    def choose(self, x_last):
        head = self.params[head_weight_name(self.config)]
        xn = self.norm(self.params[NORM_NAME], x_last)
        choice = self.stages.head_choice(len(x_last))
        for first in range(0, self.config.vocab_size, TILE_ROWS):
            tile = head[first : first + TILE_ROWS]
            tile = jnp.pad(tile, ((0, TILE_ROWS - len(tile)), (0, 0)), constant_values=jnp.nan)
            choice = self.argmax(choice, tile, xn, jnp.int32(first))
        return choice

    def plain(self, tokens):
        """The logits of ``tokens``, padded to one length for the sake of one executable."""
        padded = np.zeros((1, SLOTS), np.int32)
        padded[0, : len(tokens)] = tokens
        return self._plain(padded)[0, : len(tokens)]


def test_greedy_decoding_of_padded_prompts_equals_full_forwards(decoder):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, decoder.config.vocab_size, length) for length in LENGTHS]
    padded = np.zeros((len(LENGTHS), LENGTHS.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    caches = decoder.caches(len(LENGTHS))
    x = decoder.forward(padded, caches, np.zeros(len(LENGTHS), np.int32))
    x_last = x[np.arange(len(LENGTHS)), LENGTHS - 1][:, None]
    texts = [prompt.tolist() for prompt in prompts]
    for step in range(NEW_TOKENS):
        choice = decoder.choose(x_last)
        for text, token, logit in zip(texts, choice.token, choice.logit, strict=True):
            expected = decoder.plain(text)[-1]
            assert int(token) == int(expected.argmax())
            np.testing.assert_allclose(logit, expected.max(), rtol=1e-4)
            text.append(int(token))
        x_last = decoder.forward(np.asarray(choice.token)[:, None], caches, LENGTHS + step)


def test_a_prompt_may_be_prefilled_in_parts(decoder):
    tokens = np.random.default_rng(4).integers(0, decoder.config.vocab_size, (1, 8))
    at_once = decoder.forward(tokens, decoder.caches(1), np.zeros(1, np.int32))
    caches = decoder.caches(1)
    decoder.forward(tokens[:, :5], caches, np.zeros(1, np.int32))
    rest = decoder.forward(tokens[:, 5:], caches, np.full(1, 5, np.int32))
    np.testing.assert_allclose(rest, at_once[:, 5:], rtol=1e-4, atol=1e-5)


def test_stale_slots_beyond_the_position_do_not_matter(decoder):
    tokens = np.random.default_rng(5).integers(0, decoder.config.vocab_size, (1, 4))
    clean = decoder.forward(tokens, decoder.caches(1), np.zeros(1, np.int32))
    stale = decoder.forward(tokens, decoder.caches(1, fill=1e3), np.zeros(1, np.int32))
    np.testing.assert_array_equal(clean, stale)


def test_tokens_beyond_the_last_slot_leave_the_cache_as_it_is(decoder):
    caches = decoder.caches(1, fill=2.0)
    decoder.forward(np.zeros((1, 1), np.int32), caches, np.full(1, SLOTS, np.int32))
    assert all(np.all(np.asarray(part) == 2.0) for cache in caches for part in cache)


def test_the_lower_token_wins_a_tie_across_tiles(decoder):
    stages, width = decoder.stages, decoder.config.hidden_size
    same, xn = jnp.ones((TILE_ROWS, width)), jnp.ones((1, 1, width))
    choice = stages.head_argmax(stages.head_choice(1), same, xn, jnp.int32(0))
    choice = stages.head_argmax(choice, same, xn, jnp.int32(TILE_ROWS))
    assert int(choice.token[0]) == 0
