# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a large vocabulary, tile by tile: the logits of all tokens never exist.

The head's table ``[V, H]`` arrives in tiles of rows. A first pass keeps, per token, the running maximum,
the sum of exponentials and the label's logit (the online softmax of Milakov and Gimelshein 2018,
arXiv 1805.02867). A second pass over the same tiles computes the gradients. Within a tile, the logits
of one chunk of tokens exist at a time, at most ``CHUNK_BYTES``.

Not here: shifting labels, and dividing by the number of trained tokens; the caller's weights and scale do it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memascend_jax.models.matmul import DotDims, Precision
from memascend_jax.models.soft_cap import soft_cap_slope, soft_capped

#: Bounds the float32 logits that exist at a time.
CHUNK_BYTES = 8 << 20

_BY_HIDDEN: DotDims = (((1,), (1,)), ((), ()))
_BY_VOCABULARY: DotDims = (((1,), (0,)), ((), ()))
_BY_TOKENS: DotDims = (((0,), (0,)), ((), ()))


class HeadCarry(NamedTuple):
    """The softmax of each token over the tiles so far, float32 ``[B, S]`` each.

    The log of the sum of exponentials is ``maximum + log(total)``.
    """

    maximum: Array
    total: Array
    label_logit: Array


class Tile(NamedTuple):
    """A tile ``weight [rows, H]`` of the table, whose first row is vocabulary entry ``start``.

    With a ``soft_cap`` logits are ``soft_cap * tanh(product / soft_cap)``.
    """

    weight: Array
    start: Array
    vocab_size: int
    soft_cap: float | None

    def logits(self, xn: Array, precision: Precision) -> Array:
        """Float32 ``[tokens, rows]``; -inf at the rows that pad the last tile."""
        logits = precision.dot(xn, self.weight, _BY_HIDDEN)
        if self.soft_cap is not None:
            logits = soft_capped(logits, self.soft_cap)
        return jnp.where(self.valid(), logits, -jnp.inf) if self.padded else logits

    @property
    def padded(self) -> bool:
        """Whether the last tile has rows beyond the vocabulary: known while tracing."""
        return self.vocab_size % self.weight.shape[0] != 0

    def valid(self) -> Array:
        return self.start + jnp.arange(self.weight.shape[0]) < self.vocab_size


def make_tile(weight: Array, start: Array, vocab_size: int, soft_cap: float | None = None) -> Tile:
    """Returns the tile with the rows beyond the vocabulary zeroed, for they may hold anything, nan too."""
    tile = Tile(weight, start, vocab_size, soft_cap)
    if not tile.padded:
        return tile
    return tile._replace(weight=jnp.where(tile.valid()[:, None], weight, jnp.zeros((), weight.dtype)))


def first_carry(batch: int, seq: int) -> HeadCarry:
    """Returns the carry before any tile."""
    zeros = jnp.zeros((batch, seq), jnp.float32)
    return HeadCarry(jnp.full((batch, seq), -jnp.inf, jnp.float32), zeros, zeros)


def add_tile(carry: HeadCarry, tile: Tile, xn: Array, labels: Array, precision: Precision) -> HeadCarry:
    """Returns the carry with ``tile`` taken in; ``xn [B, S, H]`` is the normed output of the last layer."""
    chunk = _chunk_tokens(tile, labels.size)

    def one_chunk(part: tuple[HeadCarry, Array, Array]) -> HeadCarry:
        old, x, label = part
        logits = tile.logits(x, precision)
        maximum = jnp.maximum(old.maximum, logits.max(axis=-1))
        total = old.total * jnp.exp(old.maximum - maximum) + jnp.exp(logits - maximum[:, None]).sum(axis=-1)
        found = jnp.where(_is_label(tile, label), logits, 0.0).sum(axis=-1)
        return HeadCarry(maximum, total, old.label_logit + found)

    parts = (HeadCarry(*(_chunks(x, chunk) for x in carry)), _chunks(xn, chunk), _chunks(labels, chunk))
    done = lax.map(one_chunk, parts)
    return HeadCarry(*(_unchunk(x, labels.shape) for x in done))


def weighted_loss(carry: HeadCarry, weights: Array) -> Array:
    """Returns the float32 sum of ``weights * -log p(label)`` once every tile was taken in."""
    return (weights * (logsumexp(carry) - carry.label_logit)).sum()


def logsumexp(carry: HeadCarry) -> Array:
    return carry.maximum + jnp.log(carry.total)


def tile_gradients(
    carry: HeadCarry, tile: Tile, xn: Array, labels: Array, token_scale: Array, precision: Precision
) -> tuple[Array, Array]:
    """Returns the float32 ``(dxn [B, S, H], dweight [rows, H])`` that ``tile`` contributes.

    Args:
        carry: after every tile of the first pass.
        token_scale: float32 ``[B, S]``, the derivative of the loss by each token's ``-log p(label)``.
    """
    chunk = _chunk_tokens(tile, labels.size)

    def one_chunk(dweight: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        x, label, normaliser, scale = part
        logits = tile.logits(x, precision)
        probability = jnp.exp(logits - normaliser[:, None])
        dlogits = (probability - _is_label(tile, label)) * scale[:, None]
        if tile.soft_cap is not None:
            # Rows that pad the last tile have no gradient, and -inf no slope.
            slope = soft_cap_slope(logits, tile.soft_cap)
            dlogits = jnp.where(tile.valid(), dlogits * slope, 0.0)
        return dweight + precision.dot(dlogits, x, _BY_TOKENS), precision.dot(
            dlogits, tile.weight, _BY_VOCABULARY
        )

    parts = tuple(_chunks(x, chunk) for x in (xn, labels, logsumexp(carry), token_scale))
    dweight, dxn = lax.scan(one_chunk, jnp.zeros(tile.weight.shape, jnp.float32), parts)
    return _unchunk(dxn, labels.shape), dweight


def _is_label(tile: Tile, labels: Array) -> Array:
    return labels[:, None] == tile.start + jnp.arange(tile.weight.shape[0])


def _chunk_tokens(tile: Tile, tokens: int) -> int:
    """The tokens whose logits exist at a time: at least 16, for fewer make the products slow."""
    limit = max(16, CHUNK_BYTES // (4 * tile.weight.shape[0]))
    return -(-tokens // -(-tokens // limit))


def _chunks(x: Array, chunk: int) -> Array:
    """``x [B, S, …]`` as ``[chunks, chunk, …]``, the last chunk padded with zeros."""
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    pad = -flat.shape[0] % chunk
    if pad:
        flat = jnp.pad(flat, [(0, pad)] + [(0, 0)] * (flat.ndim - 1))
    return flat.reshape(-1, chunk, *x.shape[2:])


def _unchunk(x: Array, shape: tuple[int, ...]) -> Array:
    tokens = shape[0] * shape[1]
    return x.reshape(-1, *x.shape[2:])[:tokens].reshape(*shape, *x.shape[2:])
