# SPDX-License-Identifier: Apache-2.0
"""A tiny model of every architecture and variant, with weights and data that numpy alone makes.

Needs neither jax nor torch: both sides of a comparison build the same model from it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: More heads' width than hidden size, groups of queries, and a window that is shorter than a document.
_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 5
#: Of ``longrope``: one document is longer, the others are not.
ORIGINAL_POSITIONS = 16
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _config(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**_SIZES, "model_type": model_type, "architectures": [architecture], **more}


def _llama(**more: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", **{"head_dim": 8, "rope_theta": 100.0, **more})


def _scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type, **more}}


def _factors(count: int, first: float, step: float) -> list[float]:
    return [first + step * index for index in range(count)]


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": _llama(rms_norm_eps=1e-5),
    "llama3-tied-biases": _llama(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        **_scaled("llama3", **_LLAMA3, original_max_position_embeddings=16),
    ),
    "llama-linear": _llama(**_scaled("linear", factor=2.5)),
    "llama-yarn": _llama(**_scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-mscale": _llama(
        **_scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        )
    ),
    "smollm3": _config(
        "smollm3", "SmolLM3ForCausalLM", tie_word_embeddings=True, rope_theta=100.0, no_rope_layer_interval=2
    ),
    "smollm3-window": _config(
        "smollm3",
        "SmolLM3ForCausalLM",
        rope_theta=100.0,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
    ),
    "mistral": _config("mistral", "MistralForCausalLM", head_dim=8, rope_theta=100.0, sliding_window=WINDOW),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", rope_theta=100.0, tie_word_embeddings=True),
    "qwen2-window": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        rope_theta=100.0,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", head_dim=8, rope_theta=100.0),
    "qwen3-window-yarn": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        head_dim=8,
        rope_theta=100.0,
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=_MIXED,
        use_sliding_window=True,
        sliding_window=WINDOW,
        **_scaled("yarn", factor=2.0, original_max_position_embeddings=32),
    ),
    "gemma": _config("gemma", "GemmaForCausalLM", head_dim=8, rope_theta=100.0),
    "gemma2": _config(
        "gemma2",
        "Gemma2ForCausalLM",
        head_dim=8,
        rope_theta=100.0,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        # Low enough to bend what a tiny model computes.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma3": _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        head_dim=8,
        rope_theta=1000.0,
        rope_local_base_freq=10.0,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        **_scaled("linear", factor=8.0),
    ),
    "gemma3-capped-untied": _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        head_dim=8,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=WINDOW,
        final_logit_softcapping=4.0,
        tie_word_embeddings=False,
    ),
    "phi3": _config("phi3", "Phi3ForCausalLM", rope_theta=100.0, sliding_window=WINDOW),
    "phi4-mini": _config(
        "phi3",
        "Phi3ForCausalLM",
        head_dim=8,
        hidden_size=32,
        rope_theta=100.0,
        tie_word_embeddings=True,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=ORIGINAL_POSITIONS,
        **_scaled("longrope", short_factor=_factors(3, 1.0, 0.2), long_factor=_factors(3, 1.5, 1.0)),
    ),
}


@dataclass(frozen=True)
class Batch:
    """Two packed rows: a long document; two short ones and padding. Shapes ``[2, 24]``."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]
    positions: NDArray[np.int32]
    segments: NDArray[np.int32]


#: Row, first token and length of each document.
DOCUMENTS = ((0, 0, 24), (1, 0, 9), (1, 9, 12))


def tiny_weight(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> NDArray[np.float32]:
    """Returns the tensor ``name`` of the model: the same wherever it is asked for."""
    rng = np.random.default_rng(zlib.crc32(f"{config['model_type']} {name}".encode()))
    values = rng.standard_normal(shape)
    if name.endswith(".bias"):
        values = 0.3 * values
    elif len(shape) == 1:
        values = (0.0 if config["model_type"].startswith("gemma") else 1.0) + 0.2 * values
    else:
        values = 0.25 * values
    return values.astype(np.float32)


def tiny_batch(seed: int = 0) -> Batch:
    """Returns tokens of which two thirds are trained, no padding among them."""
    rng = np.random.default_rng(seed)
    shape, vocab = (2, 24), _SIZES["vocab_size"]
    tokens, labels = (rng.integers(3, vocab, shape, dtype=np.int32) for _ in range(2))
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for number, (row, first, length) in enumerate(DOCUMENTS, start=1):
        segments[row, first : first + length] = number
        positions[row, first : first + length] = np.arange(length)
    weights = (rng.random(shape) < 0.67).astype(np.float32) * (segments > 0)
    return Batch(tokens, labels, weights, positions, segments)
