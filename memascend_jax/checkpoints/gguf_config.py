# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's metadata and tensor names as Hugging Face's config and names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memascend_jax.checkpoints.gguf_header import DeferredArray, GgufHeader
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import EMBED_NAME, LM_HEAD_NAME, NORM_NAME

_WHOLE = {"token_embd.weight": EMBED_NAME, "output_norm.weight": NORM_NAME, "output.weight": LM_HEAD_NAME}
_LOCAL = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

#: Hugging Face's key by the metadata's, without the architecture before it.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}


def hf_tensor_name(name: str) -> str | None:
    """Returns Hugging Face's name of the GGUF tensor ``name``, or None when a Llama model has none."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match.group(2) not in _LOCAL:
        return None
    return f"model.layers.{int(match.group(1))}.{_LOCAL[match.group(2)]}.weight"


def config_from_gguf(header: GgufHeader, path: Path) -> dict[str, Any]:
    """Returns the ``config.json`` of a Llama model in a GGUF file.

    Raises:
        DataError: another architecture, or metadata that is missing or not computed here.
    """
    found = header.metadata
    architecture = found.get("general.architecture")
    if architecture != "llama":
        raise DataError(
            f"cannot use the model '{path}': architecture {architecture!r} is not known here; known is 'llama'"
        )
    llama = {key.removeprefix("llama."): value for key, value in found.items() if key.startswith("llama.")}
    faults = [f"llama.{key} is missing" for key in _SIZES if key not in llama]
    faults += [f"llama.{key} differs from layer to layer" for key in _SIZES if _is_array(llama.get(key))]
    if llama.get("expert_count"):
        faults.append("it is a mixture of experts")
    rotated, key_length = llama.get("rope.dimension_count"), llama.get("attention.key_length")
    if rotated is not None and key_length is not None and rotated != key_length:
        faults.append(f"only {rotated} of the {key_length} elements of each head are rotated")
    if any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        faults.append("rope type 'llama3' (tensor 'rope_freqs.weight') is not known here; known is 'default'")
    if faults:
        raise DataError(f"cannot use the model '{path}': {'; '.join(faults)}")
    return _config(found, llama, tied=all(tensor.name != "output.weight" for tensor in header.tensors))


def _config(found: dict[str, Any], llama: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    theta = llama.get("rope.freq_base", 10000.0)
    tokens = found.get("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: llama[name] for name, key in _SIZES.items()},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": found.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": found.get("tokenizer.ggml.eos_token_id"),
        "head_dim": llama.get("attention.key_length") or llama.get("rope.dimension_count"),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": llama.get("context_length", 2048),
        "mlp_bias": False,
        "num_key_value_heads": llama.get("attention.head_count_kv", llama["attention.head_count"]),
        "pad_token_id": found.get("tokenizer.ggml.padding_token_id"),
        # The metadata holds float32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": _shortest(llama.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_parameters": {"rope_theta": theta, "rope_type": _rope_type(llama)},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": llama.get("vocab_size") or (tokens.count if isinstance(tokens, DeferredArray) else 0),
    }


def _rope_type(llama: dict[str, Any]) -> str:
    kind = llama.get("rope.scaling.type", "none")
    return "default" if kind == "none" else str(kind)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def _is_array(value: Any) -> bool:
    return isinstance(value, DeferredArray)
