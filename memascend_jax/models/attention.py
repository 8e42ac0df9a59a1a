# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and causal attention inside segments, one chunk of queries against one block of keys at a time.

The scores of one chunk and block are all that exists of the score matrix, forward and backward: the backward
recomputes them from the saved log-sum-exp. Blocks that no query of a chunk may see are not computed: those after the
chunk, and those that end before the segment of its first query, or its window, begins. Source: FlashAttention-2 (Dao
2023, arXiv 2307.08691, algorithms 1 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memascend_jax.models.matmul import DotDims, Precision
from memascend_jax.models.soft_cap import soft_cap_slope, soft_capped

#: A score outside the mask. Finite, so that ``exp`` of a difference is never nan.
MASKED = -1e30

#: ``[…, rows, d] x […, keys, d]`` and ``[…, rows, keys] x […, keys, d]`` over two batch dimensions,
#: and the transposed product ``[…, rows, a] x […, rows, b] -> […, a, b]``.
_BY_LAST: DotDims = (((3,), (3,)), ((0, 1), (0, 1)))
_BY_KEYS: DotDims = (((3,), (2,)), ((0, 1), (0, 1)))
_BY_ROWS: DotDims = (((2,), (2,)), ((0, 1), (0, 1)))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How queries meet keys: scores are products times ``scale``, or ``soft_cap * tanh`` of these by ``soft_cap``.

    ``precision`` says how to multiply; softmax is in float32.
    """

    precision: Precision
    scale: float
    soft_cap: float | None = None

    def scores(self, rows: Array, keys: Array, dims: DotDims) -> Array:
        """Returns the float32 scores of ``rows`` against ``keys``."""
        scores = self.precision.dot(rows, keys, dims) * self.scale
        return scores if self.soft_cap is None else soft_capped(scores, self.soft_cap)

    def slope(self, scores: Array) -> Array | float:
        """Returns the derivative of scores by products, given the scores."""
        if self.soft_cap is None:
            return self.scale
        return soft_cap_slope(scores, self.soft_cap) * self.scale


def rotate(x: Array, angle: Array, precision: Precision, attention_factor: Array | float = 1.0) -> Array:
    """Returns ``x [B, S, heads, D]`` with its first elements turned, computed in float32 and rounded.

    Halves are paired as in Hugging Face's Llama: of ``R`` turned elements ``i`` with element ``i + R / 2``.

    Args:
        angle: float32 ``[B, S, 1, R / 2]``; the ``D - R`` elements behind are left as they are.
        attention_factor: what cosine and sine are multiplied by.
    """
    turned, left = jnp.split(x, [2 * angle.shape[-1]], axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if not isinstance(attention_factor, float) or attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = precision.round(turned)
    return jnp.concatenate([turned, left], axis=-1) if left.shape[-1] else turned


def attend(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    scoring: Scoring,
    chunk: int,
    window: Array | int | None = None,
) -> Array:
    """Returns causal attention inside equal ``segments``, in the compute dtype.

    Args:
        q: ``[B, S, heads, D]``.
        k, v: ``[B, S, kv_heads, D]``; each serves ``heads / kv_heads`` consecutive query heads.
        segments: int32 ``[B, S]``, equal ones side by side. A token sees the earlier tokens of its own segment and
            itself.
        scoring: how scores are computed.
        chunk: queries, and keys, whose scores exist at a time; the sequence is padded to a multiple of it.
        window: int32 scalar: of the tokens that a token would see, the last ``window`` are seen; None: all.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = min(chunk, seq)
    # What is padded comes after every real token, so that none of them sees it.
    q, k, v, segments = (_padded(x, -seq % rows) for x in (q, k, v, segments))
    grouped = q.reshape(batch, -1, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    limit = None if window is None else jnp.asarray(window, jnp.int32)
    out = _grouped_attention(grouped, keys, values, segments, limit, scoring, rows)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, -1, heads, dim)[:, :seq]


def _padded(x: Array, tokens: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, tokens)] + [(0, 0)] * (x.ndim - 2)) if tokens else x


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _grouped_attention(
    q: Array, k: Array, v: Array, segments: Array, window: Array | None, scoring: Scoring, chunk: int
) -> Array:
    """``q [B, K, S, G, D]``, ``k`` and ``v [B, K, S, D]``: G queries per group, rows of one product."""
    return _attention_forward(q, k, v, segments, window, scoring, chunk)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, segments: Array, window: Array | None, scoring: Scoring, chunk: int
) -> tuple[Array, tuple[Any, ...]]:
    blocks, precision = _Blocks(k, v, segments, window, chunk), scoring.precision

    def one_chunk(at: tuple[Array, Array]) -> tuple[Array, Array]:
        index, first = at
        rows = _rows(q, index, chunk)

        def one_block(block: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, weighted = sums
            scores = scoring.scores(rows, blocks.keys(block), _BY_LAST)
            scores = blocks.masked(scores, index, block)
            higher = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            # A row that sees nothing of its first blocks counts them as seen; the block of its own token undoes it.
            weights, kept = jnp.exp(scores - higher), jnp.exp(top - higher)
            total = total * kept + weights.sum(axis=-1, keepdims=True)
            return higher, total, weighted * kept + precision.dot(weights, blocks.values(block), _BY_KEYS)

        column = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
        start = (column + MASKED, column, jnp.zeros(rows.shape, jnp.float32))
        top, total, weighted = lax.fori_loop(first, index + 1, one_block, start)
        return precision.round(weighted / total), (top + jnp.log(total))[..., 0]

    outs, logsumexps = lax.map(one_chunk, blocks.chunks())
    out = _join(outs).reshape(q.shape)
    return out, (q, k, v, segments, window, out, logsumexps)


def _attention_backward(
    scoring: Scoring, chunk: int, saved: tuple[Any, ...], dout: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, segments, window, out, logsumexps = saved
    blocks, precision = _Blocks(k, v, segments, window, chunk), scoring.precision

    def one_chunk(
        sums: tuple[Array, Array], at: tuple[tuple[Array, Array], Array]
    ) -> tuple[tuple[Array, Array], Array]:
        (index, first), logsumexp = at
        rows, dout_rows = _rows(q, index, chunk), _rows(dout, index, chunk)
        products = dout_rows.astype(jnp.float32) * _rows(out, index, chunk).astype(jnp.float32)
        delta = products.sum(axis=-1, keepdims=True)

        def one_block(block: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = sums
            scores = scoring.scores(rows, blocks.keys(block), _BY_LAST)
            weights = jnp.exp(blocks.masked(scores, index, block) - logsumexp[..., None])
            dweights = precision.dot(dout_rows, blocks.values(block), _BY_LAST)
            dscores = weights * (dweights - delta) * scoring.slope(scores)
            dq += precision.dot(dscores, blocks.keys(block), _BY_KEYS)
            dk = _add_at(dk, precision.dot(dscores, rows, _BY_ROWS), block, chunk)
            return dq, dk, _add_at(dv, precision.dot(weights, dout_rows, _BY_ROWS), block, chunk)

        start = (jnp.zeros(rows.shape, jnp.float32), *sums)
        dq, dk, dv = lax.fori_loop(first, index + 1, one_block, start)
        return (dk, dv), precision.round(dq)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = lax.scan(one_chunk, (zeros, zeros), (blocks.chunks(), logsumexps))
    return _join(dq).reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_grouped_attention.defvjp(_attention_forward, _attention_backward)


class _Blocks:
    """The keys and values in blocks as long as a chunk of queries."""

    def __init__(self, k: Array, v: Array, segments: Array, window: Array | None, chunk: int) -> None:
        self._k, self._v, self._segments = k, v, segments
        self._window, self._chunk = window, chunk

    def chunks(self) -> tuple[Array, Array]:
        """The number of each chunk of queries, int32 ``[chunks]``, and of the first block that it sees."""
        segments, chunk = self._segments, self._chunk
        position = jnp.arange(segments.shape[1])
        begins = jnp.concatenate(
            [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
        )
        begin = lax.cummax(jnp.where(begins, position, 0), axis=1)
        if self._window is not None:
            begin = jnp.maximum(begin, position - self._window + 1)
        index = jnp.arange(segments.shape[1] // chunk)
        return index, begin[:, ::chunk].min(axis=0) // chunk

    def keys(self, block: Array) -> Array:
        return lax.dynamic_slice_in_dim(self._k, block * self._chunk, self._chunk, axis=2)

    def values(self, block: Array) -> Array:
        return lax.dynamic_slice_in_dim(self._v, block * self._chunk, self._chunk, axis=2)

    def masked(self, scores: Array, index: Array, block: Array) -> Array:
        """The scores ``[B, K, chunk * G, chunk]`` of the queries of chunk ``index``, ``MASKED`` where unseen."""
        chunk = self._chunk
        within = jnp.arange(chunk)
        of_query, of_key = (
            lax.dynamic_slice_in_dim(self._segments, at * chunk, chunk, axis=1) for at in (index, block)
        )
        seen = of_query[:, :, None] == of_key[:, None, :]
        query, key = (index * chunk + within)[:, None], (block * chunk + within)[None, :]
        seen &= query >= key
        if self._window is not None:
            seen &= query - key < self._window
        by_group = scores.reshape(*scores.shape[:2], chunk, -1, chunk)
        return jnp.where(seen[:, None, :, None, :], by_group, MASKED).reshape(scores.shape)


def _add_at(total: Array, part: Array, block: Array, chunk: int) -> Array:
    """``total [B, K, S, D]`` with ``part [B, K, chunk, D]`` added to one of its blocks."""
    old = lax.dynamic_slice_in_dim(total, block * chunk, chunk, axis=2)
    return lax.dynamic_update_slice_in_dim(total, old + part, block * chunk, axis=2)


def _rows(x: Array, index: Array, chunk: int) -> Array:
    """Queries of chunk ``index`` of ``x [B, K, S, G, D]`` as rows ``[B, K, chunk * G, D]``."""
    part = lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=2)
    return part.reshape(*part.shape[:2], -1, part.shape[-1])


def _join(chunks: Array) -> Array:
    """``[chunks, B, K, rows, D]`` in the order of the sequence: ``[B, K, chunks * rows, D]``."""
    return chunks.transpose(1, 2, 0, 3, 4).reshape(*chunks.shape[1:3], -1, chunks.shape[-1])
