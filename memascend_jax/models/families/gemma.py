# SPDX-License-Identifier: Apache-2.0
"""Gemma, Gemma 2 and the text of Gemma 3: scaled embeddings, ``1 + w`` norms, and from 2 on windows of every other,
or of five in six, layers, norms around each block, and soft caps (2) or normed queries and keys (3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memascend_jax.models.families.family import (
    FULL,
    SLIDING,
    Family,
    Options,
    cap_faults,
    is_count,
    layer_type_faults,
    layer_types,
    window_faults,
    write_layer_types,
)
from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope
from memascend_jax.models.rope import settings_of, write_rope

_GLOBAL_THETA, _LOCAL_THETA = 1000000.0, 10000.0
_DEFAULTS = {
    "attention_bias": False,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_DEFAULTS_2 = {
    **_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
#: Attention to what comes later is not what a causal model is trained on.
_FIXED = {"use_bidirectional_attention": False}


def _describe(options: Options) -> dict[str, Any]:
    bias = bool(options["attention_bias"])
    # What released files of the first Gemma call gelu was always the approximation.
    legacy = {"activation": "gelu_pytorch_tanh"} if options["hidden_act"] == "gelu" else {}
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "embedding_scale": options["hidden_size"] ** 0.5,
        **legacy,
    }


def _describe_2(options: Options) -> dict[str, Any]:
    return {
        **_described_alike(options),
        "attention_soft_cap": options["attn_logit_softcapping"],
        "logit_soft_cap": options["final_logit_softcapping"],
    }


def _describe_3(options: Options) -> dict[str, Any]:
    cap = options["final_logit_softcapping"]
    return {**_described_alike(options), "qk_norm": True, "logit_soft_cap": cap}


def _described_alike(options: Options) -> dict[str, Any]:
    bias = bool(options["attention_bias"])
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "embedding_scale": options["hidden_size"] ** 0.5,
        "attention_scalar": float(options["query_pre_attn_scalar"]),
    }


def _sliding_2(options: Options) -> list[bool]:
    return layer_types(options, lambda index: index % 2 == 0)


def _sliding_3(options: Options) -> list[bool]:
    pattern = options["sliding_window_pattern"]
    return layer_types(options, lambda index: (index + 1) % pattern != 0)


def _kinds_2(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    window = options["sliding_window"]
    return [LayerKind(window if slides else None, ropes[""]) for slides in _sliding_2(options)]


def _kinds_3(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    window = options["sliding_window"]
    return [
        LayerKind(window, ropes[SLIDING]) if slides else LayerKind(None, ropes[FULL])
        for slides in _sliding_3(options)
    ]


def _ropes_3(options: Options) -> dict[str, dict[str, Any]]:
    """Two: ``rope_scaling`` is about the layers that see everything."""
    newer = options.get("rope_parameters")
    nested = newer if isinstance(newer, Mapping) else {}
    full = dict(nested.get(FULL) or {}) | settings_of({"rope_scaling": options.get("rope_scaling")})
    sliding = dict(nested.get(SLIDING) or {})
    full.setdefault("rope_theta", options["rope_theta"])
    sliding.setdefault("rope_theta", options["rope_local_base_freq"])
    return {FULL: full, SLIDING: sliding}


def _faults_alike(options: Options) -> Iterator[str]:
    yield from cap_faults(options, "final_logit_softcapping", "attn_logit_softcapping")
    scalar = options["query_pre_attn_scalar"]
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not scalar > 0:
        yield f"query_pre_attn_scalar is {scalar!r}, expected a positive number"


def _faults_2(options: Options) -> Iterator[str]:
    yield from _faults_alike(options)
    faults = list(layer_type_faults(options))
    yield from faults
    yield from window_faults(options, needed=not faults and any(_sliding_2(options)))


def _faults_3(options: Options) -> Iterator[str]:
    yield from _faults_alike(options)
    faults = list(layer_type_faults(options))
    if options.get("layer_types") is None and not is_count(options["sliding_window_pattern"]):
        pattern = options["sliding_window_pattern"]
        faults.append(f"sliding_window_pattern is {pattern!r}, expected a positive whole number")
    newer = options.get("rope_parameters")
    if isinstance(newer, Mapping) and "rope_theta" in newer:
        faults.append(
            f"rope_parameters has a rope_theta, but layers differ: expected {FULL!r} and {SLIDING!r} in it"
        )
    yield from faults
    yield from window_faults(options, needed=not faults and any(_sliding_3(options)))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _write_alike(config: ModelConfig) -> dict[str, Any]:
    scalar = config.attention_scalar
    return {
        "attention_bias": config.qkv_bias,
        "final_logit_softcapping": config.logit_soft_cap,
        "attn_logit_softcapping": config.attention_soft_cap,
        "layer_types": write_layer_types(config),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "sliding_window": config.window,
    }


def _write_3(config: ModelConfig) -> dict[str, Any]:
    ropes = {
        FULL if kind.window is None else SLIDING: kind.rope for kind in config.kinds if kind.rope is not None
    }
    full, sliding = ropes.get(FULL, Rope(_GLOBAL_THETA)), ropes.get(SLIDING, Rope(_LOCAL_THETA))
    older = {key: value for key, value in write_rope(full).items() if key != "rope_theta"}
    return {
        **_write_alike(config),
        "rope_parameters": {FULL: write_rope(full), SLIDING: write_rope(sliding)},
        "rope_theta": full.theta,
        "rope_local_base_freq": sliding.theta,
        **({"rope_scaling": older} if full.type != "default" else {}),
    }


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    describe=_describe,
    write=_write,
    defaults={**_DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    fixed=_FIXED,
    indifferent=("hidden_activation",),
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    describe=_describe_2,
    write=_write_alike,
    defaults={**_DEFAULTS_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    keys=("layer_types",),
    fixed=_FIXED,
    # Of the two keys that name the activation the longer one counts.
    indifferent=("hidden_act", "cache_implementation"),
    faults=_faults_2,
    kinds=_kinds_2,
    activation="hidden_activation",
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    describe=_describe_3,
    write=_write_3,
    defaults={
        **_DEFAULTS_2,
        # What the files of models that read images too leave out.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": _GLOBAL_THETA,
        "rope_local_base_freq": _LOCAL_THETA,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    keys=("layer_types",),
    fixed={**_FIXED, "attn_logit_softcapping": None},
    indifferent=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
    faults=_faults_3,
    ropes=_ropes_3,
    kinds=_kinds_3,
    activation="hidden_activation",
)
