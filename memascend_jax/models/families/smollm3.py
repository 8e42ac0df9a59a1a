# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama, of which every fourth layer knows no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from memascend_jax.models.families.llama import LLAMA
from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope


def _turned(options: Options) -> list[bool]:
    """Whether each layer has rotary positions: ``no_rope_layers`` says 1 where it has, whatever its name."""
    given, interval = options.get("no_rope_layers"), options["no_rope_layer_interval"]
    n_layers = options["num_hidden_layers"]
    if given is not None:
        return [bool(has) for has in given[:n_layers]]
    return [(index + 1) % interval != 0 for index in range(n_layers)]


def _sliding(options: Options) -> list[bool]:
    if not options["use_sliding_window"] or options.get("sliding_window") is None:
        return [False] * options["num_hidden_layers"]
    turned = _turned(options)
    return layer_types(options, lambda index: not turned[index])


def _kinds(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    return [
        LayerKind(options["sliding_window"] if slides else None, ropes[""] if turns else None)
        for slides, turns in zip(_sliding(options), _turned(options), strict=True)
    ]


def _faults(options: Options) -> Iterator[str]:
    given, n_layers = options.get("no_rope_layers"), options["num_hidden_layers"]
    if given is not None and (
        not isinstance(given, Sequence) or len(given) < n_layers or any(has not in (0, 1) for has in given)
    ):
        yield f"no_rope_layers has to be a list of 0 or 1 for each of the {n_layers} layers"
    if given is None and not is_count(options["no_rope_layer_interval"]):
        yield f"no_rope_layer_interval is {options['no_rope_layer_interval']!r}, expected a positive whole number"
    yield from layer_type_faults(options)
    yield from window_faults(options, needed=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "layer_types": write_layer_types(config),
        "no_rope_layers": [int(kind.rope is not None) for kind in config.kind_list()],
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    describe=LLAMA.describe,
    write=_write,
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    keys=("layer_types", "no_rope_layers", "sliding_window"),
    indifferent=("max_window_layers", "pretraining_tp"),
    faults=_faults,
    kinds=_kinds,
)
