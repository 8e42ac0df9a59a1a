# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and causal attention inside segments, one chunk of queries against one block of keys at a time.

The scores of one chunk and block are all that exists of the score matrix, forward and backward: the backward
recomputes them from the saved log-sum-exp. Blocks that no query of a chunk may see are not computed: those after the
chunk, and those that end before the segment of its first query begins. Source: FlashAttention-2 (Dao 2023, arXiv
2307.08691, algorithms 1 and 2).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from memascend_jax.models.matmul import DotDims, Precision

#: A score outside the mask. Finite, so that ``exp`` of a difference is never nan.
MASKED = -1e30

#: ``[…, rows, d] x […, keys, d]`` and ``[…, rows, keys] x […, keys, d]`` over two batch dimensions,
#: and the transposed product ``[…, rows, a] x […, rows, b] -> […, a, b]``.
_BY_LAST: DotDims = (((3,), (3,)), ((0, 1), (0, 1)))
_BY_KEYS: DotDims = (((3,), (2,)), ((0, 1), (0, 1)))
_BY_ROWS: DotDims = (((2,), (2,)), ((0, 1), (0, 1)))


def rotate(x: Array, positions: Array, theta: float, precision: Precision) -> Array:
    """Returns ``x [B, S, heads, D]`` turned by its rotary positions, computed in float32 and rounded.

    Halves are paired as in Hugging Face's Llama: element ``i`` with element ``i + D / 2``.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return precision.round(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))


def attend(q: Array, k: Array, v: Array, segments: Array, precision: Precision, chunk: int) -> Array:
    """Returns causal attention inside equal ``segments``, in the compute dtype.

    Args:
        q: ``[B, S, heads, D]``.
        k, v: ``[B, S, kv_heads, D]``; each serves ``heads / kv_heads`` consecutive query heads.
        segments: int32 ``[B, S]``, equal ones side by side. A token sees the earlier tokens of its own segment and
            itself.
        precision: how to multiply; softmax is in float32.
        chunk: queries, and keys, whose scores exist at a time; the sequence is padded to a multiple of it.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = min(chunk, seq)
    # What is padded comes after every real token, so that none of them sees it.
    q, k, v, segments = (_padded(x, -seq % rows) for x in (q, k, v, segments))
    grouped = q.reshape(batch, -1, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = _grouped_attention(grouped, keys, values, segments, precision, rows)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, -1, heads, dim)[:, :seq]


def _padded(x: Array, tokens: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, tokens)] + [(0, 0)] * (x.ndim - 2)) if tokens else x


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_attention(
    q: Array, k: Array, v: Array, segments: Array, precision: Precision, chunk: int
) -> Array:
    """``q [B, K, S, G, D]``, ``k`` and ``v [B, K, S, D]``: G queries per group, rows of one product."""
    return _attention_forward(q, k, v, segments, precision, chunk)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, segments: Array, precision: Precision, chunk: int
) -> tuple[Array, tuple[Array, ...]]:
    blocks = _Blocks(k, v, segments, precision, chunk)

    def one_chunk(at: tuple[Array, Array]) -> tuple[Array, Array]:
        index, first = at
        rows = _rows(q, index, chunk)

        def one_block(block: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, weighted = sums
            scores = blocks.scores(rows, index, block)
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
    return out, (q, k, v, segments, out, logsumexps)


def _attention_backward(
    precision: Precision, chunk: int, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, logsumexps = saved
    blocks = _Blocks(k, v, segments, precision, chunk)
    scale = q.shape[-1] ** -0.5

    def one_chunk(
        sums: tuple[Array, Array], at: tuple[tuple[Array, Array], Array]
    ) -> tuple[tuple[Array, Array], Array]:
        (index, first), logsumexp = at
        rows, dout_rows = _rows(q, index, chunk), _rows(dout, index, chunk)
        products = dout_rows.astype(jnp.float32) * _rows(out, index, chunk).astype(jnp.float32)
        delta = products.sum(axis=-1, keepdims=True)

        def one_block(block: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = sums
            weights = jnp.exp(blocks.scores(rows, index, block) - logsumexp[..., None])
            dweights = precision.dot(dout_rows, blocks.values(block), _BY_LAST)
            dscores = weights * (dweights - delta) * scale
            dq += precision.dot(dscores, blocks.keys(block), _BY_KEYS)
            dk = _add_at(dk, precision.dot(dscores, rows, _BY_ROWS), block, chunk)
            return dq, dk, _add_at(dv, precision.dot(weights, dout_rows, _BY_ROWS), block, chunk)

        start = (jnp.zeros(rows.shape, jnp.float32), *sums)
        dq, dk, dv = lax.fori_loop(first, index + 1, one_block, start)
        return (dk, dv), precision.round(dq)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = lax.scan(one_chunk, (zeros, zeros), (blocks.chunks(), logsumexps))
    return _join(dq).reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_grouped_attention.defvjp(_attention_forward, _attention_backward)


class _Blocks:
    """The keys and values in blocks as long as a chunk of queries."""

    def __init__(self, k: Array, v: Array, segments: Array, precision: Precision, chunk: int) -> None:
        self._k, self._v, self._segments = k, v, segments
        self._precision, self._chunk = precision, chunk

    def chunks(self) -> tuple[Array, Array]:
        """The number of each chunk of queries, int32 ``[chunks]``, and of the first block that it sees."""
        segments, chunk = self._segments, self._chunk
        position = jnp.arange(segments.shape[1])
        begins = jnp.concatenate(
            [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
        )
        begin = lax.cummax(jnp.where(begins, position, 0), axis=1)
        index = jnp.arange(segments.shape[1] // chunk)
        return index, begin[:, ::chunk].min(axis=0) // chunk

    def keys(self, block: Array) -> Array:
        return lax.dynamic_slice_in_dim(self._k, block * self._chunk, self._chunk, axis=2)

    def values(self, block: Array) -> Array:
        return lax.dynamic_slice_in_dim(self._v, block * self._chunk, self._chunk, axis=2)

    def scores(self, rows: Array, index: Array, block: Array) -> Array:
        """The masked float32 scores ``[B, K, chunk * G, chunk]`` of the queries of chunk ``index``."""
        chunk = self._chunk
        scores = self._precision.dot(rows, self.keys(block), _BY_LAST) * rows.shape[-1] ** -0.5
        within = jnp.arange(chunk)
        of_query, of_key = (
            lax.dynamic_slice_in_dim(self._segments, at * chunk, chunk, axis=1) for at in (index, block)
        )
        seen = of_query[:, :, None] == of_key[:, None, :]
        seen &= (index * chunk + within)[:, None] >= (block * chunk + within)[None, :]
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
