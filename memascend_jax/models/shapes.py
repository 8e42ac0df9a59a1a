# SPDX-License-Identifier: Apache-2.0
"""Every tensor of an architecture: its Hugging Face name, shape and stage, from a Hugging Face config.

Nothing here reaches jax: the planner, the importers and the command line use it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.units import counted

EMBED_NAME = "model.embed_tokens.weight"
NORM_NAME = "model.norm.weight"
LM_HEAD_NAME = "lm_head.weight"
_SHOWN_FAULTS = 8


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor of a model: ``shape`` is Hugging Face's, ``[out, in]`` for a linear layer."""

    name: str
    shape: tuple[int, ...]
    stage: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama model, with the key names of Hugging Face's ``LlamaConfig``.

    ``layer_tensors`` are the tensors of a layer, by local name, where they are not Llama's: such a shape can be
    planned, and never comes from ``from_hf``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    layer_tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Returns the shape that a ``config.json`` describes; a key it leaves out has Hugging Face's default.

        Raises:
            DataError: an architecture, rope type or option that this model does not compute, a missing
                or impossible size; every fault found is listed.
        """
        from memascend_jax.models.hf_config import read_llama_config

        return read_llama_config(config)

    def to_hf(self) -> dict[str, Any]:
        """Returns the ``config.json`` of this shape, without a dtype."""
        from memascend_jax.models.hf_config import write_llama_config

        return write_llama_config(self)


def tensor_shapes(config: LlamaConfig) -> list[TensorShape]:
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


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one layer's tensors by their local names, in the order of their use."""
    if config.layer_tensors:
        return dict(config.layer_tensors)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def layer_tensor_name(index: int, local_name: str) -> str:
    """Returns the Hugging Face name of layer ``index``'s tensor ``local_name``."""
    return f"model.layers.{index}.{local_name}"


def stage_names(config: LlamaConfig) -> list[str]:
    """Returns the stages in forward order: ``embed``, ``layer.0``, …, ``head``."""
    return ["embed", *(f"layer.{index}" for index in range(config.num_hidden_layers)), "head"]


def head_weight_name(config: LlamaConfig) -> str:
    """Returns the name of the table that the head multiplies by: the embedding's when tied."""
    return EMBED_NAME if config.tie_word_embeddings else LM_HEAD_NAME


def parameter_count(config: LlamaConfig) -> int:
    """Returns the number of trained elements, a tied table counted once."""
    return sum(tensor.elements for tensor in tensor_shapes(config))


def check_tensors(found: Mapping[str, tuple[int, ...]], config: LlamaConfig, source: str) -> None:
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
