# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face's ``config.json`` of a Llama model, refusing what is not computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.models.shapes import LlamaConfig

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

#: Options that change the mathematics, with the only value that this model computes.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}

#: Where the rope settings are: since transformers 5, and before.
_ROPE = ("rope_parameters", "rope_scaling")

#: What else ``read_llama_config`` reads.
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "architectures",
    "model_type",
    "partial_rotary_factor",
    "quantization_config",
    *_ROPE,
)
#: Keys of Llama-family ``config.json`` files that change nothing here.
_INDIFFERENT = (
    "_name_or_path",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "auto_map",
    "dtype",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "is_llama_config",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "rope_interleaved",
    "rope_interleave",
    "sep_token_id",
    "task_specific_params",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_version",
    "use_cache",
)
#: Every key that a ``config.json`` of a Llama-family model may have; a real file may have others besides.
KNOWN_KEYS = frozenset({*_REQUIRED, *_OPTIONAL, *_FIXED, *_INDIFFERENT})

#: ``attention_dropout`` is accepted at any value: fine-tuning here is without dropout, as inference is.


def read_llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Returns the shape that ``config`` describes; see ``LlamaConfig.from_hf``."""
    faults = config_faults(config)
    if faults:
        raise DataError(f"cannot use this model config: {'; '.join(faults)}")
    heads = int(config["num_attention_heads"])
    eos = config.get("eos_token_id")
    sizes: dict[str, Any] = {key: int(config[key]) for key in _REQUIRED}
    return LlamaConfig(
        **sizes,
        num_key_value_heads=int(_or(config, "num_key_value_heads", heads)),
        head_dim=int(_or(config, "head_dim", int(config["hidden_size"]) // heads)),
        max_position_embeddings=int(_or(config, "max_position_embeddings", 2048)),
        rms_norm_eps=float(_or(config, "rms_norm_eps", 1e-6)),
        rope_theta=float(_or(_rope(config), "rope_theta", _or(config, "rope_theta", 10000.0))),
        tie_word_embeddings=bool(_or(config, "tie_word_embeddings", False)),
        initializer_range=float(_or(config, "initializer_range", 0.02)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
        pad_token_id=config.get("pad_token_id"),
    )


def config_faults(config: Mapping[str, Any]) -> list[str]:
    """Returns what keeps ``config`` from being computed here, a sentence each; empty when it can be."""
    return _architecture_faults(config) or [
        *_option_faults(config),
        *_size_faults(config),
        *_number_faults(config),
    ]


def write_llama_config(config: LlamaConfig) -> dict[str, Any]:
    """Returns a ``config.json`` that every version of transformers since 4.40 reads.

    ``rope_theta`` is written at the top level and, as newer versions want it, in ``rope_parameters``.
    """
    eos = config.eos_token_id
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "pretraining_tp": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _architecture_faults(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures") or []
    names = [*(listed if isinstance(listed, list) else [listed]), config.get("model_type") or "llama"]
    unknown = [repr(name) for name in names if name not in ("LlamaForCausalLM", "llama")]
    if not unknown:
        return []
    # A model names itself twice, by its class and by its type.
    return [f"architecture {' / '.join(unknown)} is not known here; known is 'LlamaForCausalLM'"]


def _option_faults(config: Mapping[str, Any]) -> list[str]:
    faults = [
        f"{key} is {config[key]!r}, only {value!r} is computed here"
        for key, value in _FIXED.items()
        if config.get(key) not in (None, value)
    ]
    faults += [
        f"{key} is {config[key]!r}, expected keys with values"
        for key in _ROPE
        if config.get(key) and not isinstance(config[key], Mapping)
    ]
    rope = _rope(config)
    rope_type = _or(rope, "rope_type", _or(rope, "type", "default"))
    if rope_type != "default":
        faults.append(f"rope type {rope_type!r} is not known here; known is 'default'")
    if _or(rope, "partial_rotary_factor", _or(config, "partial_rotary_factor", 1.0)) != 1.0:
        faults.append("partial_rotary_factor is not 1.0: rotating a part of each head is not known here")
    if "quantization_config" in config:
        faults.append("the weights are quantised (quantization_config): use an unquantised model")
    return faults


def _size_faults(config: Mapping[str, Any]) -> list[str]:
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    faults = [f"{key} is missing" for key in _REQUIRED if config.get(key) is None]
    for key in (*_REQUIRED, *optional):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            faults.append(f"{key} is {value!r}, expected a positive whole number")
    if faults:
        return faults
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = _or(config, "num_key_value_heads", heads)
    if heads % groups:
        faults.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    if config.get("head_dim") is None and hidden % heads:
        faults.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim")
    elif _or(config, "head_dim", hidden // heads) % 2:
        faults.append(
            f"head_dim {_or(config, 'head_dim', hidden // heads)} is odd, rotary positions need pairs"
        )
    return faults


def _number_faults(config: Mapping[str, Any]) -> list[str]:
    found = {key: config.get(key) for key in ("rms_norm_eps", "initializer_range")}
    found["rope_theta"] = _or(_rope(config), "rope_theta", config.get("rope_theta"))
    return [
        f"{key} is {value!r}, expected a positive number"
        for key, value in found.items()
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0)
    ]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope settings; what is no mapping is a fault of its own."""
    return next((config[key] for key in _ROPE if config.get(key) and isinstance(config[key], Mapping)), {})


def _or(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value
