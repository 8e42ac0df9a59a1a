# SPDX-License-Identifier: Apache-2.0
"""What decoding adds to a model: attention over a cache of keys and values, and greedy choice by tiles.

Prompts of different lengths are padded on the right and prefilled together from position 0. The keys
that padding leaves in the cache are harmless: a query sees only positions up to its own, and each
decoded token overwrites the slot of its position before anything sees it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memascend_jax.models.attention import MASKED, Scoring
from memascend_jax.models.losses import Tile
from memascend_jax.models.matmul import Precision


class GreedyCarry(NamedTuple):
    """The best vocabulary entry of each sequence over the tiles so far: float32 and int32 ``[B]``."""

    logit: Array
    token: Array


def first_choice(batch: int) -> GreedyCarry:
    """Returns the carry before any tile."""
    return GreedyCarry(jnp.full((batch,), -jnp.inf, jnp.float32), jnp.zeros((batch,), jnp.int32))


def choose_in_tile(carry: GreedyCarry, tile: Tile, xn: Array, precision: Precision) -> GreedyCarry:
    """Returns the better of ``carry`` and the best entry of the tile; the lower index wins a tie.

    ``xn [B, 1, H]`` is the normed last position of each sequence.
    """
    logits = tile.logits(xn[:, 0], precision)
    best = logits.argmax(axis=-1)
    logit = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    better = logit > carry.logit
    token = (tile.start + best).astype(jnp.int32)
    return GreedyCarry(jnp.where(better, logit, carry.logit), jnp.where(better, token, carry.token))


def store_in_cache(cache: Array, new: Array, start: Array) -> Array:
    """Returns ``cache [B, slots, kv_heads, D]`` with ``new [B, T, kv_heads, D]`` from slot ``start [B]`` on.

    What falls beyond the last slot is dropped.
    """
    batch, steps = new.shape[:2]
    slots = start[:, None] + jnp.arange(steps)
    return cache.at[jnp.arange(batch)[:, None], slots].set(new.astype(cache.dtype), mode="drop")


def attend_cached(
    q: Array,
    cache_k: Array,
    cache_v: Array,
    start: Array,
    scoring: Scoring,
    window: Array | int | None = None,
) -> Array:
    """Returns attention of ``q [B, T, heads, D]``, at positions from ``start [B]``, over the cache's slots.

    With a ``window`` a token sees that many slots at most, its own the last.

    The scores ``[B, heads, T, slots]`` exist at once: meant for prompts and single tokens, not training.
    """
    batch, steps, heads, dim = q.shape
    slots, kv_heads = cache_k.shape[1:3]
    rows = q.reshape(batch, steps, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    precision = scoring.precision
    scores = scoring.scores(rows, cache_k, (((3,), (3,)), ((0, 1), (0, 2))))
    positions = start[:, None] + jnp.arange(steps)
    seen = positions[:, :, None] >= jnp.arange(slots)
    if window is not None:
        seen &= positions[:, :, None] - jnp.arange(slots) < window
    scores = scores.reshape(batch, kv_heads, steps, heads // kv_heads, slots)
    scores = jnp.where(seen[:, None, :, None, :], scores, MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    by_slots = (((3,), (1,)), ((0, 1), (0, 2)))
    out = precision.round(precision.dot(weights.reshape(batch, kv_heads, -1, slots), cache_v, by_slots))
    out = out.reshape(batch, kv_heads, steps, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, steps, heads, dim)
