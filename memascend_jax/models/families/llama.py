# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1, 3.2 and 3.3, TinyLlama, SmolLM2, and what else calls itself Llama."""

from __future__ import annotations

from typing import Any

from memascend_jax.models.families.family import Family, Options
from memascend_jax.models.model_config import ModelConfig


def _describe(options: Options) -> dict[str, Any]:
    attention, mlp = bool(options["attention_bias"]), bool(options["mlp_bias"])
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias, "pretraining_tp": 1}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    describe=_describe,
    write=_write,
    defaults={"attention_bias": False, "mlp_bias": False},
    fixed={"pretraining_tp": 1},
    indifferent=("is_llama_config", "rope_interleaved", "rope_interleave"),
)
