# SPDX-License-Identifier: Apache-2.0
"""Every tensor of an architecture: its Hugging Face name, shape and stage, from a Hugging Face config.

Nothing here reaches jax: the planner, the importers and the command line use it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.units import counted

EMBED_NAME = "model.embed_tokens.weight"
NORM_NAME = "model.norm.weight"
LM_HEAD_NAME = "lm_head.weight"
_SHOWN_FAULTS = 8

#: Shapes of a layer's tensors by their local names.
LayerShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor of a model: ``shape`` is Hugging Face's, ``[out, in]`` for a linear layer."""

    name: str
    shape: tuple[int, ...]
    stage: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


def tensor_shapes(config: ModelConfig) -> list[TensorShape]:
    """Returns every parameter in forward order: the embedding, the layers, the final norm and the head.

    A tied model has no ``lm_head.weight``: its head multiplies by ``model.embed_tokens.weight``.
    """
    table = (config.vocab_size, config.hidden_size)
    shapes = [TensorShape(EMBED_NAME, table, "embed")]
    for index in range(config.num_hidden_layers):
        shapes += [
            TensorShape(layer_tensor_name(index, name), shape, f"layer.{index}")
            for name, shape in layer_shapes(config).items()
        ]
    shapes.append(TensorShape(NORM_NAME, (config.hidden_size,), "head"))
    if not config.tie_word_embeddings:
        shapes.append(TensorShape(LM_HEAD_NAME, table, "head"))
    return shapes


def layer_shapes(config: ModelConfig) -> LayerShapes:
    """Returns the shapes of one layer's tensors by their local names, in the order of their use."""
    if config.layer_tensors:
        return dict(config.layer_tensors)
    norm = (config.hidden_size,)
    after = {"post_feedforward_layernorm.weight": norm} if config.sandwich_norms else {}
    before = {"pre_feedforward_layernorm.weight": norm} if config.sandwich_norms else {}
    return {
        "input_layernorm.weight": norm,
        **_attention_shapes(config),
        "post_attention_layernorm.weight": norm,
        **before,
        **_mlp_shapes(config),
        **after,
    }


def _attention_shapes(config: ModelConfig) -> LayerShapes:
    hidden, queries, keys = config.hidden_size, config.query_size, config.key_size
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if config.fused_qkv:
        rows = {"qkv_proj": queries + 2 * keys}
    shapes: LayerShapes = {}
    for name, size in rows.items():
        shapes |= _linear(f"self_attn.{name}", (size, hidden), bias=config.qkv_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes | _linear("self_attn.o_proj", (hidden, queries), bias=config.output_bias)


def _mlp_shapes(config: ModelConfig) -> LayerShapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}
    shapes: LayerShapes = {}
    for name, size in rows.items():
        shapes |= _linear(f"mlp.{name}", (size, hidden), bias=config.mlp_bias)
    return shapes | _linear("mlp.down_proj", (hidden, inner), bias=config.mlp_bias)


def _linear(name: str, shape: tuple[int, int], *, bias: bool) -> LayerShapes:
    weight: LayerShapes = {f"{name}.weight": shape}
    return weight | {f"{name}.bias": shape[:1]} if bias else weight


def layer_tensor_name(index: int, local_name: str) -> str:
    """Returns the Hugging Face name of layer ``index``'s tensor ``local_name``."""
    return f"model.layers.{index}.{local_name}"


def stage_names(config: ModelConfig) -> list[str]:
    """Returns the stages in forward order: ``embed``, ``layer.0``, …, ``head``."""
    return ["embed", *(f"layer.{index}" for index in range(config.num_hidden_layers)), "head"]


def head_weight_name(config: ModelConfig) -> str:
    """Returns the name of the table that the head multiplies by: the embedding's when tied."""
    return EMBED_NAME if config.tie_word_embeddings else LM_HEAD_NAME


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of trained elements, a tied table counted once."""
    return sum(tensor.elements for tensor in tensor_shapes(config))


def check_tensors(found: Mapping[str, tuple[int, ...]], config: ModelConfig, source: str) -> None:
    """Returns when ``found`` holds every tensor of the model in its shape.

    Raises:
        DataError: lists every missing tensor and every wrong shape.
    """
    if config.num_hidden_layers > len(found):
        raise DataError(
            f"cannot use the model in '{source}': its config says {config.num_hidden_layers:,} layers, but it has "
            f"{counted(len(found), 'tensor', 'tensors')} only. Fetch the model again, or correct its config.json."
        )
    faults = []
    for tensor in tensor_shapes(config):
        shape = found.get(tensor.name)
        if shape is None:
            faults.append(f"'{tensor.name}' is missing, expected {list(tensor.shape)}")
        elif tuple(shape) != tensor.shape:
            faults.append(f"'{tensor.name}' has shape {list(shape)}, expected {list(tensor.shape)}")
    if faults:
        more = f"; and {len(faults) - _SHOWN_FAULTS:,} more" if len(faults) > _SHOWN_FAULTS else ""
        raise DataError(
            f"cannot use the model in '{source}': {counted(len(faults), 'tensor does', 'tensors do')} not match its "
            f"config: {'; '.join(faults[:_SHOWN_FAULTS])}{more}. "
            "Fetch the model again, or correct its config.json."
        )
