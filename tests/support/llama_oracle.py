# SPDX-License-Identifier: Apache-2.0
"""A Llama model written as plainly as possible, in float32: the oracle of the stage functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import head_weight_name, tensor_shapes

TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-5,
}


def tiny_config(*, tied: bool) -> ModelConfig:
    return ModelConfig.from_hf({**TINY, "tie_word_embeddings": tied})


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    tensors = tensor_shapes(config)
    keys = jax.random.split(jax.random.key(seed), len(tensors))
    return {
        tensor.name: jax.random.normal(key, tensor.shape) * 0.2 + (1.0 if len(tensor.shape) == 1 else 0.0)
        for key, tensor in zip(keys, tensors, strict=True)
    }


def plain_logits(config, params, tokens, positions, segments):
    x = params["model.embed_tokens.weight"][tokens]
    for index in range(config.num_hidden_layers):
        p = {k.removeprefix(f"model.layers.{index}."): v for k, v in params.items()}
        x = plain_layer(config, p, x, positions, segments)
    x = _norm(config, x, params["model.norm.weight"])
    return x @ params[head_weight_name(config)].T


def plain_loss(config, params, tokens, labels, weights, positions, segments):
    log_p = jax.nn.log_softmax(plain_logits(config, params, tokens, positions, segments))
    return -(weights * jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]).sum()


def plain_layer(config, p, x, positions, segments):
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    h = _norm(config, x, p["input_layernorm.weight"])
    q, k, v = (h @ p[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q = _turn(config, q.reshape(*x.shape[:2], heads, dim), positions)
    k = _turn(config, k.reshape(*x.shape[:2], groups, dim), positions)
    v = v.reshape(*x.shape[:2], groups, dim)
    k, v = (jnp.repeat(a, heads // groups, axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
    order = jnp.arange(x.shape[1])
    seen = (segments[:, :, None] == segments[:, None, :]) & (order[:, None] >= order[None, :])
    probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    attended = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(*x.shape[:2], -1)
    x = x + attended @ p["self_attn.o_proj.weight"].T
    h = _norm(config, x, p["post_attention_layernorm.weight"])
    inner = jax.nn.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)
    return x + inner @ p["mlp.down_proj.weight"].T


def _norm(config, x, weight):
    return weight * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)


def _turn(config, x, positions):
    """Rotary positions as complex numbers: another derivation than the code's."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] / config.rope_theta ** (jnp.arange(half) * 2 / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
