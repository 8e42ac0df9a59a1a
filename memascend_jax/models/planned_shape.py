# SPDX-License-Identifier: Apache-2.0
"""The shape of a model that need not be trainable here: enough to plan its memory and its traffic.

Decoders of the Llama family differ in a layer's tensors: biases, norms of queries and keys, fused projections, experts.
Whatever else they compute differently costs no memory that a plan would see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.models.hf_config import config_faults, read_llama_config
from memascend_jax.models.shapes import LlamaConfig, layer_shapes

Shapes = dict[str, tuple[int, ...]]

#: Of Hugging Face's defaults for keys that a config leaves out, those that are not Llama's.
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A model to plan for.

    Attributes:
        notes: why it can be planned but not trained yet; empty when it can be trained.
        idle_elements: elements that a token does not touch: those of the experts it is not sent to.
    """

    config: LlamaConfig
    notes: tuple[str, ...] = ()
    idle_elements: int = 0


def planned_shape(config: Mapping[str, Any]) -> PlannedShape:
    """Returns the shape that a ``config.json`` describes, as exactly as its architecture is known.

    Raises:
        DataError: sizes are missing or impossible, or the experts of an unknown architecture would have to be guessed.
    """
    config = config.get("text_config", config)
    faults = config_faults(config)
    if not faults:
        return PlannedShape(read_llama_config(config))
    model_type = str(config.get("model_type", "unknown"))
    family = _FAMILIES.get(model_type)
    if family is None and any(config.get(key) for key in _EXPERT_COUNTS):
        raise DataError(
            f"cannot plan for model_type {model_type!r}: the shape of its experts is not known here"
        )
    base = read_llama_config(_as_llama(config, model_type))
    layer = (family or _llama)(config, base)
    notes = [f"training does not know this model yet, only its shape is planned: {'; '.join(faults)}"]
    if family is None:
        notes.append(f"model_type {model_type!r} is not known: its layers are taken to be Llama's")
    shape = replace(base, layer_tensors=tuple(layer.items()))
    return PlannedShape(shape, tuple(notes), _idle_elements(config, layer) * base.num_hidden_layers)


def _as_llama(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the keys that say how large a model is, those that every decoder has."""
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    sizes = {key: config[key] for key in kept if config.get(key) is not None}
    tied = config.get("tie_word_embeddings")
    sizes["tie_word_embeddings"] = model_type in _TIED_BY_DEFAULT if tied is None else bool(tied)
    if model_type == "qwen3_moe" and "moe_intermediate_size" in config:
        sizes["intermediate_size"] = config["moe_intermediate_size"] * config.get("num_experts_per_tok", 8)
    return sizes


def _idle_elements(config: Mapping[str, Any], layer: Shapes) -> int:
    experts = int(next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0))
    used = int(config.get("num_experts_per_tok", experts))
    if not experts:
        return 0
    elements = sum(prod(shape) for name, shape in layer.items() if ".experts." in name)
    return elements * (experts - used) // experts


def _llama(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    shapes = layer_shapes(base)
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    biased = (attention if config.get("attention_bias") else ()) + (mlp if config.get("mlp_bias") else ())
    return _with_biases(shapes, biased)


def _with_biases(shapes: Shapes, modules: tuple[str, ...]) -> Shapes:
    biases = {f"{module}.bias": shapes[f"{module}.weight"][:1] for module in modules}
    return {**shapes, **biases}


def _qwen2(_: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    return _with_biases(layer_shapes(base), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))


def _qwen3(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    norms: Shapes = {"self_attn.q_norm.weight": (base.head_dim,), "self_attn.k_norm.weight": (base.head_dim,)}
    return {**_llama(config, base), **norms}


def _gemma2(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    hidden = (base.hidden_size,)
    more: Shapes = {"pre_feedforward_layernorm.weight": hidden, "post_feedforward_layernorm.weight": hidden}
    return {**_llama(config, base), **more}


def _gemma3(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    return {**_qwen3(config, base), **_gemma2(config, base)}


def _phi3(_: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    shapes = layer_shapes(base)
    fused: dict[str, tuple[str, ...]] = {
        "self_attn.qkv_proj.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name, modules in fused.items():
        rows = sum(shapes.pop(f"{module}.weight")[0] for module in modules)
        shapes[name] = (rows, base.hidden_size)
    return shapes


def _mixtral(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    experts, inner, hidden = int(config["num_local_experts"]), base.intermediate_size, base.hidden_size
    expert: Shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    return _experts(base, "block_sparse_moe", experts, expert)


def _qwen3_moe(config: Mapping[str, Any], base: LlamaConfig) -> Shapes:
    experts, inner, hidden = (
        int(config["num_experts"]),
        int(config["moe_intermediate_size"]),
        base.hidden_size,
    )
    expert: Shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norms: Shapes = {"self_attn.q_norm.weight": (base.head_dim,), "self_attn.k_norm.weight": (base.head_dim,)}
    return {**_experts(base, "mlp", experts, expert), **norms}


def _experts(base: LlamaConfig, module: str, experts: int, expert: Shapes) -> Shapes:
    shared = {name: shape for name, shape in layer_shapes(base).items() if not name.startswith("mlp.")}
    shared[f"{module}.gate.weight"] = (experts, base.hidden_size)
    own = {
        f"{module}.experts.{index}.{name}.weight": shape
        for index in range(experts)
        for name, shape in expert.items()
    }
    return {**shared, **own}


_FAMILIES: dict[str, Callable[[Mapping[str, Any], LlamaConfig], Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
    "gemma": _llama,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
