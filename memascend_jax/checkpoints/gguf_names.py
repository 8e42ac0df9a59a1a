# SPDX-License-Identifier: Apache-2.0
"""The names of GGUF's tensors for those of Hugging Face, and what llama.cpp's converter changes in each family.

Names are those of the ``gguf`` package's tables; a test holds them equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memascend_jax.models.shapes import EMBED_NAME, LM_HEAD_NAME, NORM_NAME

_WHOLE = {EMBED_NAME: "token_embd.weight", NORM_NAME: "output_norm.weight", LM_HEAD_NAME: "output.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")

_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_DENSE = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_LLAMA = {**_ATTENTION, **_DENSE, "post_attention_layernorm": "ffn_norm"}
_QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA2 = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3 = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
_QWEN_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How the tensors of an architecture are stored.

    Attributes:
        names: GGUF's by Hugging Face's, within a layer.
        permuted: modules whose rows are in the order of rotated pairs.
        offset: what norms have too much: their weights are stored with it added.
    """

    names: Mapping[str, str]
    permuted: tuple[str, ...] = ()
    offset: float = 0.0


_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
#: By ``general.architecture``.
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily({**_LLAMA, **_MIXTRAL}, _ROTATED),
    "smollm3": GgufFamily(_LLAMA, _ROTATED),
    "qwen2": GgufFamily(_LLAMA),
    "qwen3": GgufFamily({**_LLAMA, **_QK_NORM}),
    "qwen3moe": GgufFamily(
        {**_ATTENTION, "post_attention_layernorm": "ffn_norm", **_QK_NORM, **_QWEN_EXPERTS}
    ),
    "gemma": GgufFamily(_LLAMA, offset=1.0),
    "gemma2": GgufFamily(_GEMMA2, offset=1.0),
    "gemma3": GgufFamily({**_GEMMA2, **_QK_NORM}, offset=1.0),
    "phi3": GgufFamily(_PHI3),
}
#: Tensors that hold what is in the config: the scaling of rotary positions.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class GgufName:
    """Where a tensor of Hugging Face is: a GGUF tensor, or one expert's part of it."""

    name: str
    expert: int | None = None


def gguf_name(name: str, family: GgufFamily) -> GgufName | None:
    """Returns where the tensor ``name`` of Hugging Face is, or None when the family has none of that name."""
    if name in _WHOLE:
        return GgufName(_WHOLE[name])
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    expert = _EXPERT.fullmatch(module)
    if expert is not None:
        module = f"{expert[1]}.{expert[3]}"
    theirs = family.names.get(module)
    if theirs is None:
        return None
    return GgufName(f"blk.{layer}.{theirs}.{kind}", int(expert[2]) if expert is not None else None)


def module_of(name: str) -> str:
    """Returns the module, within its layer, of a tensor of Hugging Face; outside of layers all before the last dot."""
    match = _LAYER.fullmatch(name)
    return match[2] if match is not None else name.rpartition(".")[0]
