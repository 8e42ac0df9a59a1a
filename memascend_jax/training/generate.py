# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding that streams the model from its placement: one pass over the stages per token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.training.forward_backward import StreamedModel
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey
from memascend_jax.units import round_up

#: Prompts are padded to a multiple of this, so that few executables serve all lengths.
_PROMPT_STEP = 32


@dataclass(slots=True)
class _Cache:
    keys: list[jax.Array]
    values: list[jax.Array]


def generate_greedy(
    model: StreamedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Collection[int]
) -> list[list[int]]:
    """Returns the tokens that greedily follow each of ``prompts``, without the stop token.

    All prompts advance together; one that has stopped is carried along until the last one stops.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = round_up(int(lengths.max()), _PROMPT_STEP)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = _empty_cache(model, len(prompts), width + max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    done = np.zeros(len(prompts), bool)
    start, last = np.zeros_like(lengths), lengths - 1
    for _ in range(max_new_tokens):
        chosen = _next_tokens(model, cache, tokens, start, last)
        for index, token in enumerate(chosen.tolist()):
            done[index] |= token in stop_ids
            if not done[index]:
                answers[index].append(token)
        if done.all():
            break
        start = lengths if tokens.shape[1] > 1 else start + 1
        tokens, last = chosen[:, None], np.zeros_like(lengths)
    return answers


def _empty_cache(model: StreamedModel, batch: int, slots: int) -> _Cache:
    config = model.layout.config
    shape = (batch, slots, config.num_key_value_heads, config.head_dim)
    dtype = model.layout.format.param_dtype
    layers = range(model.layout.n_layers)
    zeros = model.functions.zeros
    return _Cache([zeros(shape, dtype) for _ in layers], [zeros(shape, dtype) for _ in layers])


def _next_tokens(
    model: StreamedModel,
    cache: _Cache,
    tokens: NDArray[np.int32],
    start: NDArray[np.int32],
    last: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Returns the greedy token ``[batch]`` after position ``last`` of ``tokens`` and updates the cache."""
    functions = model.functions
    rows, inverse = np.unique(tokens, return_inverse=True)
    table = np.zeros((tokens.size, model.layout.config.hidden_size), model.param_dtype)
    table[: len(rows)] = model.rows_ahead.read(EMBED_NAME, rows.astype(np.int64))
    put = functions.put
    x: Any = functions.embed(put(table), put(inverse.reshape(tokens.shape).astype(np.int32)))
    with model.forward_stages() as stages:
        for layer in range(model.layout.n_layers):
            params = stages.use(StageKey(LAYER, layer))
            x, cache.keys[layer], cache.values[layer] = functions.layer_cached(
                params, x, cache.keys[layer], cache.values[layer], start, functions.kinds[layer]
            )
            del params
            stages.advance()
        weight = stages.use(StageKey(NORM, 0))["weight"]
        x = functions.head_norm(weight, functions.take_position(x, last))
        del weight
        stages.advance()
        choice = functions.head_choice(len(tokens))
        for tile in range(model.layout.n_head_tiles):
            weight = stages.use(StageKey(HEAD, tile))["weight"]
            choice = functions.head_argmax(choice, weight, x, model.tile_starts[tile])
            del weight
            stages.advance()
        return np.asarray(choice.token)
