# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and causal attention inside segments, one chunk of queries at a time.

The scores of one chunk are all that exists of the score matrix, forward and backward: the backward
recomputes them from the saved log-sum-exp, as FlashAttention-2 does (Dao 2023, arXiv 2307.08691,
algorithm 2; here the chunk is of queries only).
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
        segments: int32 ``[B, S]``. A token sees the earlier tokens of its own segment and itself.
        precision: how to multiply; softmax is in float32.
        chunk: queries whose scores exist at a time; the largest divisor of ``S`` up to it is taken.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    rows = _largest_divisor(seq, chunk)
    out = _grouped_attention(
        grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments, precision, rows
    )
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, seq, heads, dim)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_attention(
    q: Array, k: Array, v: Array, segments: Array, precision: Precision, chunk: int
) -> Array:
    """``q [B, K, S, G, D]``, ``k`` and ``v [B, K, S, D]``: G queries per group, rows of one product."""
    return _attention_forward(q, k, v, segments, precision, chunk)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, segments: Array, precision: Precision, chunk: int
) -> tuple[Array, tuple[Array, ...]]:
    def one_chunk(start: Array) -> tuple[Array, Array]:
        scores = _scores(q, k, segments, start, precision, chunk)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out = precision.dot(weights / total, v, _BY_KEYS)
        return precision.round(out), (top + jnp.log(total))[..., 0]

    outs, logsumexps = lax.map(one_chunk, jnp.arange(0, q.shape[2], chunk))
    out = _join(outs).reshape(q.shape)
    return out, (q, k, v, segments, out, logsumexps)


def _attention_backward(
    precision: Precision, chunk: int, saved: tuple[Array, ...], dout: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, logsumexps = saved
    inverse_root = q.shape[-1] ** -0.5

    def one_chunk(sums: tuple[Array, Array], at: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        dk, dv = sums
        start, logsumexp = at
        weights = jnp.exp(_scores(q, k, segments, start, precision, chunk) - logsumexp[..., None])
        dout_rows, out_rows = _rows(dout, start, chunk), _rows(out, start, chunk)
        delta = (dout_rows.astype(jnp.float32) * out_rows.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        dscores = weights * (precision.dot(dout_rows, v, _BY_LAST) - delta) * inverse_root
        dq = precision.round(precision.dot(dscores, k, _BY_KEYS))
        dk += precision.dot(dscores, _rows(q, start, chunk), _BY_ROWS)
        dv += precision.dot(weights, dout_rows, _BY_ROWS)
        return (dk, dv), dq

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dqs = lax.scan(one_chunk, (zeros, zeros), (jnp.arange(0, q.shape[2], chunk), logsumexps))
    return _join(dqs).reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_grouped_attention.defvjp(_attention_forward, _attention_backward)


def _scores(q: Array, k: Array, segments: Array, start: Array, precision: Precision, chunk: int) -> Array:
    """The masked float32 scores ``[B, K, chunk * G, S]`` of the queries from ``start``."""
    batch, kv_heads, seq, group, dim = q.shape
    scores = precision.dot(_rows(q, start, chunk), k, _BY_LAST) * dim**-0.5
    query = start + jnp.arange(chunk)
    same = lax.dynamic_slice_in_dim(segments, start, chunk, axis=1)[:, :, None] == segments[:, None, :]
    seen = same & (query[:, None] >= jnp.arange(seq)[None, :])
    by_group = scores.reshape(batch, kv_heads, chunk, group, seq)
    return jnp.where(seen[:, None, :, None, :], by_group, MASKED).reshape(scores.shape)


def _rows(x: Array, start: Array, chunk: int) -> Array:
    """Queries ``start … start + chunk`` of ``x [B, K, S, G, D]`` as rows ``[B, K, chunk * G, D]``."""
    part = lax.dynamic_slice_in_dim(x, start, chunk, axis=2)
    return part.reshape(*part.shape[:2], -1, part.shape[-1])


def _join(chunks: Array) -> Array:
    """``[chunks, B, K, rows, D]`` in the order of the sequence: ``[B, K, chunks * rows, D]``."""
    return chunks.transpose(1, 2, 0, 3, 4).reshape(*chunks.shape[1:3], -1, chunks.shape[-1])


def _largest_divisor(seq: int, limit: int) -> int:
    return next(size for size in range(min(seq, limit), 0, -1) if seq % size == 0)
