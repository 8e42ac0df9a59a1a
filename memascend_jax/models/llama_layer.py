# SPDX-License-Identifier: Apache-2.0
"""A Llama layer in Flax NNX, for training and for decoding. ``llama`` cuts the model into functions.

Parameters keep Hugging Face's names and layout, ``[out, in]``. Norms, rotary positions and softmax are
computed in float32; the result of each linear layer is rounded to the compute dtype, as in Hugging Face.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from memascend_jax.models.adapters import Adapters
from memascend_jax.models.attention import attend, rotate
from memascend_jax.models.generate import attend_cached, store_in_cache
from memascend_jax.models.lora import Factor, adapted_linear
from memascend_jax.models.matmul import Precision, linear
from memascend_jax.models.shapes import LlamaConfig


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Returns float32 ``weight * x / sqrt(mean(x²) + eps)`` over the last axis."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale * weight.astype(jnp.float32)


class Norm(nnx.Module):
    """RMS norm over the hidden axis, rounded to the compute dtype."""

    def __init__(self, config: LlamaConfig, precision: Precision) -> None:
        self.weight = nnx.Param(jnp.ones((config.hidden_size,)))
        self.eps = config.rms_norm_eps
        self.precision = precision

    def __call__(self, x: Array) -> Array:
        return self.precision.round(rms_norm(x, self.weight[...], self.eps))


class Linear(nnx.Module):
    """``x @ weight.T`` without bias, and a LoRA adapter where one was added."""

    def __init__(self, in_features: int, out_features: int, precision: Precision) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features)))
        self.precision = precision
        self.lora_scale: float | None = None

    def add_adapter(self, rank: int, scale: float) -> None:
        out_features, in_features = self.weight.shape
        self.lora_A, self.lora_B = Factor(rank, in_features), Factor(out_features, rank)
        self.lora_scale = scale

    def __call__(self, x: Array) -> Array:
        if self.lora_scale is None:
            return linear(x, self.weight[...], self.precision)
        a, b = self.lora_A.weight[...], self.lora_B.weight[...]
        return adapted_linear(x, self.weight[...], a, b, self.lora_scale, self.precision)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, precision: Precision, chunk: int) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, config.num_attention_heads * dim, precision)
        self.k_proj = Linear(hidden, config.num_key_value_heads * dim, precision)
        self.v_proj = Linear(hidden, config.num_key_value_heads * dim, precision)
        self.o_proj = Linear(config.num_attention_heads * dim, hidden, precision)
        self.head_dim = dim
        self.theta = config.rope_theta
        self.precision = precision
        self.chunk = chunk

    def __call__(self, x: Array, positions: Array, segments: Array) -> Array:
        q, k, v = self._project(x, positions)
        return self._join(attend(q, k, v, segments, self.precision, self.chunk))

    def cached(self, x: Array, cache_k: Array, cache_v: Array, start: Array) -> tuple[Array, Array, Array]:
        q, k, v = self._project(x, start[:, None] + jnp.arange(x.shape[1]))
        cache_k, cache_v = store_in_cache(cache_k, k, start), store_in_cache(cache_v, v, start)
        return self._join(attend_cached(q, cache_k, cache_v, start, self.precision)), cache_k, cache_v

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(x, positions, self.theta, self.precision) for x in (q, k))
        return q, k, v

    def _join(self, heads: Array) -> Array:
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class Mlp(nnx.Module):
    """The gated feed-forward block, ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, precision: Precision) -> None:
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, precision)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, precision)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, precision)
        self.precision = precision

    def __call__(self, x: Array) -> Array:
        gate, up = self.gate_proj(x).astype(jnp.float32), self.up_proj(x).astype(jnp.float32)
        return self.down_proj(self.precision.round(jax.nn.silu(gate) * up))


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

    def __init__(self, config: LlamaConfig, precision: Precision, attention_chunk: int) -> None:
        self.input_layernorm = Norm(config, precision)
        self.self_attn = Attention(config, precision, attention_chunk)
        self.post_attention_layernorm = Norm(config, precision)
        self.mlp = Mlp(config, precision)
        self.precision = precision

    def __call__(self, x: Array, positions: Array, segments: Array) -> Array:
        x = self._add(x, self.self_attn(self.input_layernorm(x), positions, segments))
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))

    def cached(self, x: Array, cache_k: Array, cache_v: Array, start: Array) -> tuple[Array, Array, Array]:
        attended, cache_k, cache_v = self.self_attn.cached(self.input_layernorm(x), cache_k, cache_v, start)
        x = self._add(x, attended)
        return self._add(x, self.mlp(self.post_attention_layernorm(x))), cache_k, cache_v

    def _add(self, x: Array, y: Array) -> Array:
        return self.precision.round(x.astype(jnp.float32) + y.astype(jnp.float32))
