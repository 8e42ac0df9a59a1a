# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama, of which every layer sees a window of the tokens before it, if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memascend_jax.models.families.family import Family, Options, window_faults
from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope


def _kinds(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    return [LayerKind(options["sliding_window"], ropes[""])]


def _faults(options: Options) -> Iterator[str]:
    yield from window_faults(options, needed=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.window}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    write=_write,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False},
    faults=_faults,
    kinds=_kinds,
)
