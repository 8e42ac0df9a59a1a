# SPDX-License-Identifier: Apache-2.0
"""Windows and rotary angles of layers that share one executable.

Where all layers are of one kind both are constants of the executable. Where kinds differ the number of a layer's kind
is an argument, which picks a row of small tables: a window that is none is longer than any sequence, and a layer that
knows no positions turns by angles of zero.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope
from memascend_jax.models.rope import frequencies

#: A window that hides nothing; differences of positions stay below it.
_NO_WINDOW = 1 << 30


def kind_number(config: ModelConfig, layer: int) -> int | None:
    """Returns what tells a layer's kind to ``window_of`` and ``angles_of``; None where all are alike."""
    return config.layer_kinds[layer] if len(config.kinds) > 1 else None


def window_of(config: ModelConfig, kind: Array | None) -> Array | int | None:
    """Returns how many tokens a token of the layer sees, itself included; None: all."""
    windows = [_window(config, kind) for kind in config.kinds]
    if all(window is None for window in windows):
        return None
    if kind is None:
        return windows[0]
    return jnp.array([_NO_WINDOW if window is None else window for window in windows], jnp.int32)[kind]


def _window(config: ModelConfig, kind: LayerKind) -> int | None:
    """The window of ``kind``, unless no sequence is longer."""
    hides = kind.window is not None and kind.window < config.max_position_embeddings
    return kind.window if hides else None


def angles_of(
    config: ModelConfig, kind: Array | None, positions: Array, lengths: Array | None
) -> Array | None:
    """Returns float32 ``[B, S, 1, rotated / 2]``, the angles of each token's pairs; None: the layer turns nothing.

    Args:
        positions: int32 ``[B, S]``.
        lengths: int32 that broadcasts to ``[B, S]``: of each token's document, for rope types that ask for it; see
            ``asks_for_lengths``.
    """
    if kind is None and config.kinds[0].rope is None:
        return None
    return positions.astype(jnp.float32)[..., None, None] * _frequencies(config, kind, lengths)


def attention_factor_of(config: ModelConfig, kind: Array | None) -> Array | float:
    """Returns what cosine and sine are multiplied by."""
    factors = [1.0 if kind.rope is None else kind.rope.attention_factor for kind in config.kinds]
    if kind is None or len(set(factors)) == 1:
        return factors[0]
    return jnp.array(factors, jnp.float32)[kind]


def asks_for_lengths(config: ModelConfig) -> bool:
    """Whether the angles of a token depend on how long its document is."""
    return any(kind.rope is not None and kind.rope.type == "longrope" for kind in config.kinds)


def document_lengths(positions: Array, segments: Array) -> Array:
    """Returns int32 ``[B, S]``, the number of positions of each token's segment: its last position and one."""
    seq = segments.shape[1]
    last = jnp.concatenate(
        [segments[:, 1:] != segments[:, :-1], jnp.ones_like(segments[:, :1], bool)], axis=1
    )
    end = lax.cummin(jnp.where(last, jnp.arange(seq), seq - 1), axis=1, reverse=True)
    return jnp.take_along_axis(positions, end, axis=1) + 1


def _frequencies(config: ModelConfig, kind: Array | None, lengths: Array | None) -> Array:
    """The angles at position 1, ``[rotated / 2]``, or ``[B, S, 1, rotated / 2]`` where lengths decide."""
    rotated = config.rotated_size
    if kind is None and config.kinds[0].rope is not None and config.kinds[0].rope.type == "default":
        # The one expression of it that there ever was: its bits are those of every earlier run.
        half = rotated // 2
        return config.kinds[0].rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    short = _table(config, kind, long=False)
    if not asks_for_lengths(config) or lengths is None:
        return short
    limits = [0 if each.rope is None else each.rope.original_positions for each in config.kinds]
    limit = limits[0] if kind is None else jnp.array(limits, jnp.int32)[kind]
    is_long = jnp.broadcast_to(lengths, jnp.broadcast_shapes(lengths.shape, (1, 1)))[..., None, None] > limit
    return jnp.where(is_long, _table(config, kind, long=True), short)


def _table(config: ModelConfig, kind: Array | None, *, long: bool) -> Array:
    rows = np.stack([_row(each.rope, config.rotated_size, long=long) for each in config.kinds])
    return jnp.asarray(rows)[0 if kind is None else kind]


def _row(rope: Rope | None, rotated: int, *, long: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    if rope is None:
        return np.zeros(rotated // 2, np.float32)
    return frequencies(rope, rotated, long=long)
