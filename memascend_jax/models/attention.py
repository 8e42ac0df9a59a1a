# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and causal attention inside segments, one chunk of queries at a time.

The scores of one chunk are all that exists of the score matrix, forward and backward: the backward
recomputes them from the saved log-sum-exp, as FlashAttention-2 does (Dao 2023, arXiv 2307.08691,
algorithm 2; here the chunk is of queries only).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import Array, lax

from memascend_jax.models.matmul import DotDims, Precision

#: A score outside the mask. Finite, so that ``exp`` of a difference is never nan.
MASKED = -1e30

#: The queries are cut into this many spans; each computes scores with the keys up to its own end only, so that
#: 4 spans do 5/8 of the square's work. More spans save little and each is compiled for itself.
_SPANS = 4

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
        segments: int32 ``[B, S]``. A token sees the earlier tokens of its own segment and itself.
        precision: how to multiply; softmax is in float32.
        chunk: queries whose scores exist at a time; the sequence is padded to a multiple of it.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = min(chunk, seq)
    # What is padded comes after every real token, so that none of them sees it.
    q, k, v, segments = (_padded(x, -seq % rows) for x in (q, k, v, segments))
    grouped = q.reshape(batch, -1, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    out = _grouped_attention(
        grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments, precision, rows
    )
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
    spans = [
        _span_forward(_Span(k, v, segments, first, last), q, precision, chunk)
        for first, last in _spans(q.shape[2], chunk)
    ]
    out = jnp.concatenate([_join(out) for out, _ in spans], axis=2).reshape(q.shape)
    return out, (q, k, v, segments, out, *(logsumexps for _, logsumexps in spans))


def _attention_backward(
    precision: Precision, chunk: int, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, *logsumexps = saved
    dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for (first, last), of_span in zip(_spans(q.shape[2], chunk), logsumexps, strict=True):
        span = _Span(k, v, segments, first, last)
        dq, dkeys, dvalues = _span_backward(span, q, out, dout, of_span, precision, chunk)
        dqs.append(_join(dq))
        dk, dv = dk.at[:, :, :last].add(dkeys), dv.at[:, :, :last].add(dvalues)
    dq = jnp.concatenate(dqs, axis=2).reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_grouped_attention.defvjp(_attention_forward, _attention_backward)


class _Span:
    """The queries ``first … last``, whose chunks share one loop, and the keys that any of them sees."""

    def __init__(self, k: Array, v: Array, segments: Array, first: int, last: int) -> None:
        self.keys, self.values, self.segments = k[:, :, :last], v[:, :, :last], segments[:, :last]
        self.first, self.last = first, last

    def scores(self, q: Array, start: Array, precision: Precision, chunk: int) -> Array:
        """The masked float32 scores ``[B, K, chunk * G, last]`` of the queries from ``start``."""
        batch, kv_heads, _, group, dim = q.shape
        scores = precision.dot(_rows(q, start, chunk), self.keys, _BY_LAST) * dim**-0.5
        query = start + jnp.arange(chunk)
        of_query = lax.dynamic_slice_in_dim(self.segments, start, chunk, axis=1)
        seen = of_query[:, :, None] == self.segments[:, None, :]
        seen &= query[:, None] >= jnp.arange(self.last)[None, :]
        by_group = scores.reshape(batch, kv_heads, chunk, group, self.last)
        return jnp.where(seen[:, None, :, None, :], by_group, MASKED).reshape(scores.shape)


def _span_forward(span: _Span, q: Array, precision: Precision, chunk: int) -> tuple[Array, Array]:
    """The outputs ``[chunks, B, K, rows, D]`` and log-sum-exps of a span's queries."""

    def one_chunk(start: Array) -> tuple[Array, Array]:
        scores = span.scores(q, start, precision, chunk)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out = precision.round(precision.dot(weights / total, span.values, _BY_KEYS))
        return out, (top + jnp.log(total))[..., 0]

    outs, logsumexps = lax.map(one_chunk, jnp.arange(span.first, span.last, chunk))
    return outs, logsumexps


def _span_backward(
    span: _Span, q: Array, out: Array, dout: Array, logsumexps: Array, precision: Precision, chunk: int
) -> tuple[Array, Array, Array]:
    """The gradients ``[chunks, B, K, rows, D]`` of a span's queries, and those of its keys and values."""

    def one_chunk(sums: tuple[Array, Array], at: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        dk, dv = sums
        start, logsumexp = at
        weights = jnp.exp(span.scores(q, start, precision, chunk) - logsumexp[..., None])
        dout_rows, out_rows = _rows(dout, start, chunk), _rows(out, start, chunk)
        delta = (dout_rows.astype(jnp.float32) * out_rows.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        dscores = weights * (precision.dot(dout_rows, span.values, _BY_LAST) - delta) * q.shape[-1] ** -0.5
        dq = precision.round(precision.dot(dscores, span.keys, _BY_KEYS))
        dk += precision.dot(dscores, _rows(q, start, chunk), _BY_ROWS)
        dv += precision.dot(weights, dout_rows, _BY_ROWS)
        return (dk, dv), dq

    zeros = jnp.zeros(span.keys.shape, jnp.float32)
    starts = jnp.arange(span.first, span.last, chunk)
    (dk, dv), dq = lax.scan(one_chunk, (zeros, zeros), (starts, logsumexps))
    return dq, dk, dv


def _rows(x: Array, start: Array, chunk: int) -> Array:
    """Queries ``start … start + chunk`` of ``x [B, K, S, G, D]`` as rows ``[B, K, chunk * G, D]``."""
    part = lax.dynamic_slice_in_dim(x, start, chunk, axis=2)
    return part.reshape(*part.shape[:2], -1, part.shape[-1])


def _join(chunks: Array) -> Array:
    """``[chunks, B, K, rows, D]`` in the order of the sequence: ``[B, K, chunks * rows, D]``."""
    return chunks.transpose(1, 2, 0, 3, 4).reshape(*chunks.shape[1:3], -1, chunks.shape[-1])


def _spans(seq: int, chunk: int) -> list[tuple[int, int]]:
    """The queries in up to ``_SPANS`` runs of whole chunks, as ``(first, last)``."""
    chunks = seq // chunk
    edges = [round(chunks * part / min(chunks, _SPANS)) * chunk for part in range(min(chunks, _SPANS) + 1)]
    return list(pairwise(edges))
