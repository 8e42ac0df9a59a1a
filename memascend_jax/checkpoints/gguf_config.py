# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's metadata as Hugging Face's ``config.json``, by architecture.

What a file leaves out, because llama.cpp knows it of the architecture, is as in the published models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.gguf_header import DeferredArray, GgufHeader
from memascend_jax.checkpoints.gguf_names import FAMILIES
from memascend_jax.checkpoints.gguf_rope import rope_settings
from memascend_jax.errors import DataError

#: Hugging Face's key by the metadata's, without the architecture before it.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
#: Numbers of other kinds that are read.
_NUMBERS = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "context_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "vocab_size",
)

Values = dict[str, Any]
#: Returns a tensor of the file by its GGUF name, or None where there is none.
ReadTensor = Callable[[str], "NDArray[np.float32] | None"]


def config_from_gguf(
    header: GgufHeader, path: Path, names: Mapping[str, Any], read: ReadTensor
) -> dict[str, Any]:
    """Returns the ``config.json`` of the model in a GGUF file.

    Args:
        names: of the tensors that it has.
        read: for the small tensors that hold settings.

    Raises:
        DataError: an unknown architecture, or metadata that is missing or makes no sense; every fault is listed.
    """
    found = header.metadata
    architecture = found.get("general.architecture")
    if architecture not in FAMILIES:
        raise DataError(
            f"cannot use the model '{path}': architecture {architecture!r} is not known here; known are "
            f"{', '.join(map(repr, FAMILIES))}"
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    faults = [f"{prefix}{key} is missing" for key in _SIZES if key not in values]
    read_keys = [key for key in (*_SIZES, *_NUMBERS) if key in values]
    faults += [f"{prefix}{key} differs from layer to layer" for key in read_keys if _is_array(values[key])]
    faults += [
        f"{prefix}{key} is {values[key]!r}, expected a number"
        for key in read_keys
        if not _is_array(values[key]) and not _is_number(values[key])
    ]
    if not faults and values["block_count"] > len(names):
        faults.append(
            f"{prefix}block_count is {values['block_count']:,}, but it has {len(names):,} tensors only"
        )
    if faults:
        raise DataError(f"cannot use the model '{path}': {'; '.join(faults)}")
    family = "mixtral" if architecture == "llama" and values.get("expert_count") else architecture
    values["tied"] = "output.weight" not in names
    values["bias"] = any(name.endswith(".attn_q.bias") for name in names)
    head_dim = _head_dim(values)
    rotated = values.get("rope.dimension_count") or head_dim
    rope = rope_settings(values, rotated, read, str(path))
    if head_dim and rotated != head_dim:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"] = rotated / head_dim
    values["rope"] = rope
    config = _common(found, values, head_dim) | _rope(rope) | _OF_FAMILY[family](values, head_dim)
    if "partial_rotary_factor" in values:
        config["partial_rotary_factor"] = values["partial_rotary_factor"]
    return config


def _common(found: Mapping[str, Any], values: Values, head_dim: int) -> Values:
    tokens = found.get("tokenizer.ggml.tokens")
    return {
        **{key: values[name] for name, key in _SIZES.items()},
        "attention_dropout": 0.0,
        "bos_token_id": found.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": found.get("tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": values.get("context_length", 2048),
        "num_key_value_heads": values.get("attention.head_count_kv", values["attention.head_count"]),
        "pad_token_id": found.get("tokenizer.ggml.padding_token_id"),
        # The metadata holds float32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": _shortest(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "tie_word_embeddings": values["tied"],
        "use_cache": True,
        "vocab_size": values.get("vocab_size") or (tokens.count if isinstance(tokens, DeferredArray) else 0),
    }


def _rope(settings: Values) -> Values:
    """The settings under the keys of transformers 5, and of older versions."""
    scaled = {key: value for key, value in settings.items() if key != "rope_theta"}
    older = {} if settings["rope_type"] == "default" else {"rope_scaling": scaled}
    return {"rope_parameters": settings, "rope_theta": settings["rope_theta"], **older}


def _llama(values: Values, head_dim: int) -> Values:
    # Mistral's models are of this architecture too; without a window they compute the same.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": values["bias"],
        "mlp_bias": False,
    }


def _smollm3(values: Values, head_dim: int) -> Values:
    layers = values["block_count"]
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


def _mixtral(values: Values, head_dim: int) -> Values:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": values["expert_count"],
        "num_experts_per_tok": values.get("expert_used_count", 2),
        "sliding_window": None,
    }


def _qwen2(values: Values, head_dim: int) -> Values:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(values: Values, head_dim: int) -> Values:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": values["bias"],
        "use_sliding_window": False,
    }


def _qwen3_moe(values: Values, head_dim: int) -> Values:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": values["bias"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": values.get("expert_feed_forward_length", values["feed_forward_length"]),
        "norm_topk_prob": True,
        "num_experts": values.get("expert_count"),
        "num_experts_per_tok": values.get("expert_used_count", 8),
        "use_sliding_window": False,
    }


def _gemma(values: Values, head_dim: int) -> Values:
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(values: Values, head_dim: int) -> Values:
    return {
        **_gemma(values, head_dim),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(values, head_dim, largest=46),
        "sliding_window": values.get("attention.sliding_window", 4096),
    }


def _gemma3(values: Values, head_dim: int) -> Values:
    local = {"rope_theta": values.get("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    return {
        **_gemma(values, head_dim),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scale(values, head_dim, largest=62),
        "rope_local_base_freq": local["rope_theta"],
        # Layers with a window have positions of their own, which are never scaled.
        "rope_parameters": {"full_attention": values["rope"], "sliding_attention": local},
        "sliding_window": values.get("attention.sliding_window", 1024),
        "sliding_window_pattern": 6,
    }


def _query_scale(values: Values, head_dim: int, *, largest: int) -> int:
    """What queries are scaled by: a head's size, but in the largest models hidden size over heads."""
    if values["block_count"] == largest:
        return int(values["embedding_length"] // values["attention.head_count"])
    return head_dim


def _phi3(values: Values, head_dim: int) -> Values:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values.get("context_length", 4096)
        ),
        "resid_pdrop": 0.0,
        # llama.cpp writes 0 for none.
        "sliding_window": values.get("attention.sliding_window") or None,
    }


_OF_FAMILY: dict[str, Callable[[Values, int], Values]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def _head_dim(values: Values) -> int:
    heads = values["attention.head_count"] or 1
    return int(values.get("attention.key_length") or values["embedding_length"] // heads)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def _is_array(value: Any) -> bool:
    return isinstance(value, DeferredArray)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
