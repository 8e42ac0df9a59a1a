# SPDX-License-Identifier: Apache-2.0
"""The shape of a model that need not be trainable here: enough to plan its memory and its traffic.

What ``families`` knows is planned as it is trained. Of mixtures of experts only the tensors are known, and what else
calls itself a decoder is taken for Llama, whose sizes most have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.models.families import FAMILIES
from memascend_jax.models.hf_config import config_faults, read_config
from memascend_jax.models.language_model import language_model_config
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import LayerShapes, layer_shapes

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A model to plan for.

    Attributes:
        notes: why it can be planned but not trained yet; empty when it can be trained.
        idle_elements: elements that a token does not touch: those of the experts it is not sent to.
    """

    config: ModelConfig
    notes: tuple[str, ...] = ()
    idle_elements: int = 0


def planned_shape(config: Mapping[str, Any]) -> PlannedShape:
    """Returns the shape that a ``config.json`` describes, as exactly as its architecture is known.

    Raises:
        DataError: sizes are missing or impossible, or the experts of an unknown architecture would have to be guessed.
    """
    config = _text_part(config)
    faults = config_faults(config)
    if not faults:
        return PlannedShape(read_config(config))
    model_type = str(config.get("model_type", "unknown"))
    family = _FAMILIES.get(model_type)
    if family is None and any(config.get(key) for key in _EXPERT_COUNTS):
        raise DataError(
            f"cannot plan for model_type {model_type!r}: the shape of its experts is not known here"
        )
    base = read_config(_sizes(config))
    layer = family(config, base) if family else layer_shapes(base)
    notes = [f"training does not know this model yet, only its shape is planned: {'; '.join(faults)}"]
    if family is None and model_type not in FAMILIES:
        notes.append(f"model_type {model_type!r} is not known: its layers are taken to be Llama's")
    shape = replace(base, layer_tensors=tuple(layer.items()))
    return PlannedShape(shape, tuple(notes), _idle_elements(config, layer) * base.num_hidden_layers)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """As ``language_model_config``, and of an architecture that is not known here what it says of its text part."""
    config = language_model_config(config)
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that say how large a model is, those that every decoder has."""
    kept = (
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
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
    if config.get("model_type") in FAMILIES:
        sizes["model_type"] = config["model_type"]
    if config.get("model_type") == "qwen3_moe" and "moe_intermediate_size" in config:
        sizes["intermediate_size"] = config["moe_intermediate_size"] * config.get("num_experts_per_tok", 8)
    return sizes


def _idle_elements(config: Mapping[str, Any], layer: LayerShapes) -> int:
    experts = int(next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0))
    used = int(config.get("num_experts_per_tok", experts))
    if not experts:
        return 0
    elements = sum(prod(shape) for name, shape in layer.items() if ".experts." in name)
    return elements * (experts - used) // experts


def _mixtral(config: Mapping[str, Any], base: ModelConfig) -> LayerShapes:
    experts, inner, hidden = int(config["num_local_experts"]), base.intermediate_size, base.hidden_size
    expert: LayerShapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    return _experts(base, "block_sparse_moe", experts, expert)


def _qwen3_moe(config: Mapping[str, Any], base: ModelConfig) -> LayerShapes:
    experts, inner, hidden = (
        int(config["num_experts"]),
        int(config["moe_intermediate_size"]),
        base.hidden_size,
    )
    expert: LayerShapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return _experts(replace(base, qk_norm=True), "mlp", experts, expert)


def _experts(base: ModelConfig, module: str, experts: int, expert: LayerShapes) -> LayerShapes:
    shared = {name: shape for name, shape in layer_shapes(base).items() if not name.startswith("mlp.")}
    shared[f"{module}.gate.weight"] = (experts, base.hidden_size)
    own = {
        f"{module}.experts.{index}.{name}.weight": shape
        for index in range(experts)
        for name, shape in expert.items()
    }
    return {**shared, **own}


_FAMILIES: dict[str, Callable[[Mapping[str, Any], ModelConfig], LayerShapes]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
