# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (biases of queries, keys and values) and Qwen3 (their norms); windows of the upper layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memascend_jax.models.families.family import (
    Family,
    Options,
    is_count,
    layer_type_faults,
    layer_types,
    window_faults,
    write_layer_types,
)
from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope

_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _window(options: Options) -> int | None:
    return options["sliding_window"] if options["use_sliding_window"] else None


def _sliding(options: Options) -> list[bool]:
    """Without ``layer_types`` the first ``max_window_layers`` see everything, whatever the key's name says."""
    window, first = _window(options), options["max_window_layers"]
    return layer_types(options, lambda index: window is not None and index >= first)


def _kinds(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    window = _window(options)
    return [LayerKind(window if slides else None, ropes[""]) for slides in _sliding(options)]


def _faults(options: Options) -> Iterator[str]:
    faults = list(layer_type_faults(options))
    yield from faults
    yield from window_faults(options, needed=False)
    if not faults and _window(options) is None and any(_sliding(options)):
        yield "layer_types has 'sliding_attention', but there is no window: see use_sliding_window, sliding_window"
    if not is_count(options["max_window_layers"], 0):
        yield f"max_window_layers is {options['max_window_layers']!r}, expected a whole number"


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": write_layer_types(config),
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "attention_bias": config.qkv_bias}


def _describe_qwen2(_: Options) -> dict[str, Any]:
    return {"qkv_bias": True}


def _describe_qwen3(options: Options) -> dict[str, Any]:
    bias = bool(options["attention_bias"])
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    describe=_describe_qwen2,
    write=_write,
    defaults=_DEFAULTS,
    keys=("layer_types",),
    fixed={"use_mrope": False},
    faults=_faults,
    kinds=_kinds,
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    describe=_describe_qwen3,
    write=_write_qwen3,
    defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
    keys=("layer_types",),
    faults=_faults,
    kinds=_kinds,
)
