# SPDX-License-Identifier: Apache-2.0
"""An independent Llama and training loop: whole model, whole logits, optax, nothing streamed.

Shares no code with ``memascend_jax.models`` and ``memascend_jax.training``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax


def round_to(x, dtype):
    """Rounds float32 ``x`` to ``dtype``; for bfloat16 as the forward does: to nearest even."""
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def linear(x, w, dtype):
    product = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    return round_to(product, dtype)


def rms_norm(x, w, eps, dtype):
    h = x.astype(jnp.float32)
    h = round_to(h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps), dtype)
    return round_to(h.astype(jnp.float32) * w.astype(jnp.float32), dtype)


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def forward(params, cfg, tokens, positions, segments, dtype, lora_scale=0.0):
    """Returns float32 logits ``[B, S, V]``."""
    batch, seq = tokens.shape
    x = round_to(params["model.embed_tokens.weight"][tokens], dtype)
    for i in range(cfg.num_hidden_layers):
        p = {
            k.removeprefix(f"model.layers.{i}."): v
            for k, v in params.items()
            if k.startswith(f"model.layers.{i}.")
        }

        def project(h, name, p=p):
            y = linear(h, p[f"{name}.weight"], dtype)
            if f"{name}.lora_A.weight" not in p:
                return y
            low = linear(h, p[f"{name}.lora_A.weight"], dtype)
            return round_to(y + lora_scale * linear(low, p[f"{name}.lora_B.weight"], dtype), dtype)

        h = rms_norm(x, p["input_layernorm.weight"], cfg.rms_norm_eps, dtype)
        q = project(h, "self_attn.q_proj").reshape(batch, seq, -1, cfg.head_dim)
        k = project(h, "self_attn.k_proj").reshape(batch, seq, -1, cfg.head_dim)
        v = project(h, "self_attn.v_proj").reshape(batch, seq, -1, cfg.head_dim)
        q, k = rope(q, positions, cfg.rope_theta), rope(k, positions, cfg.rope_theta)
        groups = cfg.num_attention_heads // cfg.num_key_value_heads
        k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk",
            q.astype(jnp.float32),
            k.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(seen[:, None], scores * cfg.head_dim**-0.5, -1e30)
        weights = round_to(jax.nn.softmax(scores, -1), dtype).astype(jnp.float32)
        out = jnp.einsum(
            "bhqk,bkhd->bqhd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        x = x + project(round_to(out, dtype).reshape(batch, seq, -1), "self_attn.o_proj")
        h = rms_norm(x, p["post_attention_layernorm.weight"], cfg.rms_norm_eps, dtype)
        gate = project(h, "mlp.gate_proj")
        up = project(h, "mlp.up_proj")
        gate = round_to(jax.nn.silu(gate.astype(jnp.float32)), dtype)
        x = x + project(gate * up, "mlp.down_proj")
    x = rms_norm(x, params["model.norm.weight"], cfg.rms_norm_eps, dtype)
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return jnp.matmul(x.astype(jnp.float32), head.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


def ties_away(master):
    """Rounds float32 to bfloat16, to nearest with ties away from zero, by its bits."""
    bits = np.ascontiguousarray(master, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16)


def gradient_function(cfg, dtype, lora_scale=0.0):
    """Returns ``(params, batch, n_trained) -> (loss, gradients)`` of one micro-batch, divided by ``n_trained``."""

    @jax.jit
    def gradients(params, batch, n_trained):
        def loss_of(p):
            inputs = batch["tokens"], batch["positions"], batch["segments"]
            logits = forward(p, cfg, *inputs, dtype, lora_scale)
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return (nll * batch["weights"]).sum() / n_trained

        wide = {name: value.astype(jnp.float32) for name, value in params.items()}
        return jax.value_and_grad(loss_of)(wide)

    return gradients


def train(
    masters,
    cfg,
    steps_of_micro_batches,
    schedule,
    *,
    dtype,
    clip_norm,
    weight_decay,
    rate_factors=None,
    lora_scale=0.0,
):
    """Trains in memory with optax; returns the losses and the final parameters as float32 numpy.

    A layer has a LoRA adapter where its factors are among ``masters``, times ``lora_scale``.

    With ``rate_factors`` only what it names is trained, each with its factor on the learning rate; the norm that is
    clipped is that of what is trained.

    Gradients of all micro-batches are summed in float32 and rounded once to ``dtype``; masters and moments are
    float32; parameters are their masters, rounded to ``dtype``.
    """
    dtype = jnp.dtype(dtype)
    decayed = {name: value.ndim > 1 for name, value in masters.items()}
    factors = dict.fromkeys(masters, 1.0) if rate_factors is None else rate_factors
    labels = {name: str(factors.get(name, "frozen")) for name in masters}

    def adamw(factor):
        return optax.adamw(
            lambda count: schedule(count) * factor,
            weight_decay=weight_decay,
            mask=lambda params: {name: decayed[name] for name in params},
        )

    tx = optax.chain(
        optax.masked(optax.clip_by_global_norm(clip_norm), {name: name in factors for name in masters}),
        optax.multi_transform(
            {
                "frozen": optax.set_to_zero(),
                **{str(factor): adamw(factor) for factor in set(factors.values())},
            },
            labels,
        ),
    )

    gradients = gradient_function(cfg, dtype, lora_scale)
    update = jax.jit(tx.update)
    opt_state = tx.init(masters)
    losses = []
    for micro_batches in steps_of_micro_batches:
        n_trained = sum(float(batch["weights"].sum()) for batch in micro_batches)
        rounded = {n: m if dtype == jnp.float32 else ties_away(np.asarray(m)) for n, m in masters.items()}
        loss, grads = 0.0, None
        for batch in micro_batches:
            part, g = gradients(rounded, batch, n_trained)
            loss += float(part)
            grads = g if grads is None else jax.tree.map(jnp.add, grads, g)
        grads = jax.tree.map(lambda g: g.astype(dtype).astype(jnp.float32), grads)
        updates, opt_state = update(grads, opt_state, masters)
        masters = optax.apply_updates(masters, updates)
        losses.append(loss)
    return losses, {name: np.asarray(value) for name, value in masters.items()}
