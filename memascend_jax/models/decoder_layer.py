# SPDX-License-Identifier: Apache-2.0
"""A decoder layer in Flax NNX, for training and for decoding, as a ``ModelConfig`` describes it.

``model_stages`` cuts the model into functions. Parameters keep Hugging Face's names and layout, ``[out, in]``. Norms,
rotary positions and softmax are computed in float32; the result of each linear layer is rounded to the compute dtype,
as in Hugging Face. A feed-forward block of another kind is a module in the place of ``Mlp``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from memascend_jax.models.adapters import Adapters
from memascend_jax.models.attention import Scoring, attend, rotate
from memascend_jax.models.generate import attend_cached, store_in_cache
from memascend_jax.models.layer_kinds import (
    angles_of,
    asks_for_lengths,
    attention_factor_of,
    document_lengths,
    window_of,
)
from memascend_jax.models.lora import Factor, adapted_linear
from memascend_jax.models.matmul import Precision, biased_linear, linear
from memascend_jax.models.model_config import ModelConfig

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """Returns float32 ``(offset + weight) * x / sqrt(mean(x²) + eps)`` over the last axis."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain = weight.astype(jnp.float32)
    return wide * scale * (gain + offset if offset else gain)


class Norm(nnx.Module):
    """RMS norm over the last axis of ``size`` elements, rounded to the compute dtype."""

    def __init__(self, config: ModelConfig, size: int, precision: Precision) -> None:
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = config.rms_norm_eps
        self.offset = config.norm_offset
        self.precision = precision

    def __call__(self, x: Array) -> Array:
        return self.precision.round(rms_norm(x, self.weight[...], self.eps, self.offset))


class Linear(nnx.Module):
    """``x @ weight.T``, plus ``bias`` where there is one, and a LoRA adapter where one was added."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, *, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features)))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_features,)))
        self.has_bias = bias
        self.precision = precision
        self.lora_scale: float | None = None

    def add_adapter(self, rank: int, scale: float) -> None:
        out_features, in_features = self.weight.shape
        self.lora_A, self.lora_B = Factor(rank, in_features), Factor(out_features, rank)
        self.lora_scale = scale

    def __call__(self, x: Array) -> Array:
        if self.lora_scale is not None:
            return self._adapted(x, self.lora_scale)
        if self.has_bias:
            return biased_linear(x, self.weight[...], self.bias[...], self.precision)
        return linear(x, self.weight[...], self.precision)

    def _adapted(self, x: Array, scale: float) -> Array:
        a, b = self.lora_A.weight[...], self.lora_B.weight[...]
        y = adapted_linear(x, self.weight[...], a, b, scale, self.precision)
        if not self.has_bias:
            return y
        bias = self.precision.round(self.bias[...]).astype(jnp.float32)
        return self.precision.round(y.astype(jnp.float32) + bias)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, precision: Precision, chunk: int) -> None:
        hidden, queries, keys = config.hidden_size, config.query_size, config.key_size
        into = partial(Linear, hidden, precision=precision, bias=config.qkv_bias)
        if config.fused_qkv:
            self.qkv_proj = into(queries + 2 * keys)
        else:
            self.q_proj, self.k_proj, self.v_proj = into(queries), into(keys), into(keys)
        if config.qk_norm:
            self.q_norm = Norm(config, config.head_dim, precision)
            self.k_norm = Norm(config, config.head_dim, precision)
        self.o_proj = Linear(queries, hidden, precision, bias=config.output_bias)
        self.config = config
        self.scoring = Scoring(precision, config.attention_scale, config.attention_soft_cap)
        self.chunk = chunk

    def __call__(self, x: Array, positions: Array, segments: Array, kind: Array | None) -> Array:
        lengths = document_lengths(positions, segments) if asks_for_lengths(self.config) else None
        q, k, v = self._project(x, positions, lengths, kind)
        window = window_of(self.config, kind)
        return self._join(attend(q, k, v, segments, self.scoring, self.chunk, window))

    def cached(
        self, x: Array, cache_k: Array, cache_v: Array, start: Array, kind: Array | None
    ) -> tuple[Array, Array, Array]:
        positions = start[:, None] + jnp.arange(x.shape[1])
        # A text that may outgrow the shorter form of positions has the longer one from its first token on, for what
        # is in the cache is turned already.
        q, k, v = self._project(x, positions, jnp.int32(cache_k.shape[1]), kind)
        cache_k, cache_v = store_in_cache(cache_k, k, start), store_in_cache(cache_v, v, start)
        window = window_of(self.config, kind)
        return self._join(attend_cached(q, cache_k, cache_v, start, self.scoring, window)), cache_k, cache_v

    def _project(
        self, x: Array, positions: Array, lengths: Array | None, kind: Array | None
    ) -> tuple[Array, Array, Array]:
        q, k, v = (
            part.reshape(*x.shape[:2], -1, self.config.head_dim) for part in self._queries_keys_values(x)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = angles_of(self.config, kind, positions, lengths)
        if angles is not None:
            factor = attention_factor_of(self.config, kind)
            q, k = (rotate(x, angles, self.scoring.precision, factor) for x in (q, k))
        return q, k, v

    def _queries_keys_values(self, x: Array) -> tuple[Array, Array, Array]:
        if not self.config.fused_qkv:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries, keys = self.config.query_size, self.config.key_size
        q, k, v = jnp.split(self.qkv_proj(x), [queries, queries + keys], axis=-1)
        return q, k, v

    def _join(self, heads: Array) -> Array:
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class Mlp(nnx.Module):
    """The gated feed-forward block, ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        into = partial(Linear, hidden, precision=precision, bias=config.mlp_bias)
        if config.fused_gate_up:
            self.gate_up_proj = into(2 * inner)
        else:
            self.gate_proj, self.up_proj = into(inner), into(inner)
        self.down_proj = Linear(inner, hidden, precision, bias=config.mlp_bias)
        self.config = config
        self.precision = precision

    def __call__(self, x: Array) -> Array:
        gate, up = (part.astype(jnp.float32) for part in self._gate_up(x))
        activated = _ACTIVATIONS[self.config.activation](gate)
        return self.down_proj(self.precision.round(activated * up))

    def _gate_up(self, x: Array) -> tuple[Array, Array]:
        if not self.config.fused_gate_up:
            return self.gate_proj(x), self.up_proj(x)
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return gate, up


def add_adapters(layer: nnx.Module, adapters: Adapters | None) -> None:
    """Adds an adapter to each of a layer's linear modules that ``adapters`` names."""
    for name in adapters.modules if adapters is not None else ():
        assert adapters is not None
        module: Any = layer
        for part in name.split("."):
            module = getattr(module, part)
        module.add_adapter(adapters.rank, adapters.scale)


class DecoderLayer(nnx.Module):
    """One transformer layer; the residual stream is in the compute dtype."""

    def __init__(self, config: ModelConfig, precision: Precision, attention_chunk: int) -> None:
        norm = partial(Norm, config, config.hidden_size, precision)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, precision, attention_chunk)
        self.post_attention_layernorm = norm()
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.mlp = Mlp(config, precision)
        self.sandwich_norms = config.sandwich_norms
        self.precision = precision

    def __call__(self, x: Array, positions: Array, segments: Array, kind: Array | None = None) -> Array:
        """Returns the layer's output; ``kind`` is the number of its kind where kinds differ, an int32 scalar."""
        attended = self.self_attn(self.input_layernorm(x), positions, segments, kind)
        return self._feed_forward(self._attended(x, attended))

    def cached(
        self, x: Array, cache_k: Array, cache_v: Array, start: Array, kind: Array | None = None
    ) -> tuple[Array, Array, Array]:
        normed = self.input_layernorm(x)
        attended, cache_k, cache_v = self.self_attn.cached(normed, cache_k, cache_v, start, kind)
        return self._feed_forward(self._attended(x, attended)), cache_k, cache_v

    def _attended(self, x: Array, attended: Array) -> Array:
        # Where norms are on both sides of a block, the one that Llama has before the next block is behind this one.
        return self._add(x, self.post_attention_layernorm(attended) if self.sandwich_norms else attended)

    def _feed_forward(self, x: Array) -> Array:
        if self.sandwich_norms:
            return self._add(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))

    def _add(self, x: Array, y: Array) -> Array:
        return self.precision.round(x.astype(jnp.float32) + y.astype(jnp.float32))
