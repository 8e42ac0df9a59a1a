# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 from its GGUF file against what transformers computed (``tests/golden/make_smollm2_logits.py``).

One layer's weights are in memory at a time. Skipped where the model was never fetched.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from memascend_jax.checkpoints.smollm2 import cached_smollm2_135m
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME, layer_tensor_name

pytestmark = pytest.mark.integration

#: Of logits between about -20 and 25, after 30 layers of float32 in another order.
LOGIT_TOLERANCE = 1e-3
GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_logits.npz"
PROMPTS = 3
SLOTS, NEW_TOKENS = 48, 24


@pytest.fixture(scope="module")
def checkpoint():
    path = cached_smollm2_135m()
    if path is None:
        pytest.skip("SmolLM2-135M-Instruct is not in the cache: run the main job once, it fetches the model")
    opened = open_checkpoint(path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return dict(stored)


def whole(checkpoint, name):
    values = np.concatenate([piece for _, piece in checkpoint.pieces(name)])
    return values.reshape(checkpoint.tensors[name].shape)


def layers(checkpoint, config, names):
    for index in range(config.num_hidden_layers):
        yield {name: whole(checkpoint, layer_tensor_name(index, name)) for name in names}


def padded_prompts(golden):
    tokens = [golden[f"tokens_{index}"] for index in range(PROMPTS)]
    lengths = np.array([len(part) for part in tokens], np.int32)
    padded = np.zeros((PROMPTS, lengths.max()), np.int32)
    for row, part in zip(padded, tokens, strict=True):
        row[: len(part)] = part
    return padded, lengths


def test_tokenizer_gives_the_golden_tokens(checkpoint, golden):
    tokenizer = checkpoint.tokenizer()
    for index in range(PROMPTS):
        prompt = str(golden[f"prompt_{index}"])
        ids = tokenizer.encode(prompt).ids
        assert ids == golden[f"tokens_{index}"].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_each_digit_is_a_word_of_its_own(checkpoint):
    # The space before a number stays with the spaces before it, as the model was trained to see it.
    assert checkpoint.tokenizer().encode("x =   42").tokens == ["x", "Ġ=", "ĠĠĠ", "4", "2"]


def test_exported_tokenizer_is_the_same(checkpoint, golden):
    files = checkpoint.export_files()
    exported = Tokenizer.from_buffer(files["tokenizer.json"])
    for index in range(PROMPTS):
        assert exported.encode(str(golden[f"prompt_{index}"])).ids == golden[f"tokens_{index}"].tolist()
    named = json.loads(files["tokenizer_config.json"])
    assert (named["bos_token"], named["eos_token"], named["pad_token"]) == (
        *("<|im_start|>", "<|im_end|>", "<|im_end|>"),
    )
    assert files["chat_template.jinja"].decode() == checkpoint.chat_template


def test_logits_are_those_of_transformers(checkpoint, golden):
    config = ModelConfig.from_hf(checkpoint.config)
    stages = ModelStages(config, "float32")
    tokens, lengths = padded_prompts(golden)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    segments = (positions < lengths[:, None]).astype(np.int32)
    table = whole(checkpoint, EMBED_NAME)
    layer = jax.jit(stages.layer)
    x = stages.embed(
        jnp.asarray(table[tokens].reshape(-1, config.hidden_size)),
        np.arange(tokens.size).reshape(tokens.shape),
    )
    for params in layers(checkpoint, config, stages.layer_names):
        x = layer(params, x, positions, segments)
    xn = stages.head_norm(whole(checkpoint, NORM_NAME), x)
    for index, length in enumerate(lengths):
        logits = np.asarray(xn[index, :length]) @ table.T
        top = golden[f"top_tokens_{index}"]
        errors = [
            np.take_along_axis(logits, top, axis=-1) - golden[f"top_logits_{index}"],
            logits[:, golden["spread"]] - golden[f"spread_logits_{index}"],
        ]
        assert max(np.abs(error).max() for error in errors) <= LOGIT_TOLERANCE


def test_greedy_continuation_is_that_of_transformers(checkpoint, golden):
    config = ModelConfig.from_hf(checkpoint.config)
    stages = ModelStages(config, "float32")
    table, norm = whole(checkpoint, EMBED_NAME), whole(checkpoint, NORM_NAME)
    # Held whole here, for 24 passes over the file would take a minute.
    params = list(layers(checkpoint, config, stages.layer_names))
    layer, argmax = jax.jit(stages.layer_cached), jax.jit(stages.head_argmax)
    tokens, lengths = padded_prompts(golden)
    shape = (PROMPTS, SLOTS, config.num_key_value_heads, config.head_dim)
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params]
    start, written = np.zeros(PROMPTS, np.int32), []
    last = lengths - 1
    for _ in range(NEW_TOKENS):
        x = jnp.asarray(table[tokens])
        for index, weights in enumerate(params):
            x, *caches[index] = layer(weights, x, *caches[index], start)
        xn = stages.head_norm(norm, x[np.arange(PROMPTS), last][:, None])
        choice = stages.head_choice(PROMPTS)
        for first in range(0, config.vocab_size, 8192):
            choice = argmax(choice, table[first : first + 8192], xn, jnp.int32(first))
        tokens, last = np.asarray(choice.token)[:, None], np.zeros(PROMPTS, np.int32)
        start = lengths + len(written)
        written.append(tokens[:, 0])
    for index, row in enumerate(np.stack(written, axis=1)):
        assert row.tolist() == golden[f"greedy_{index}"].tolist()
