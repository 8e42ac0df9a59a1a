# SPDX-License-Identifier: Apache-2.0
"""Writes tiny models in the formats that ``checkpoints`` reads, with the packages that define the formats."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import save_file

from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes

#: Rows are multiples of 256, the longest quantisation block.
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_config(**changes):
    return {**HF_CONFIG, **changes}


def random_tensors(config, dtype=np.float32, seed=0):
    """Every tensor of the model ``config`` describes, under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    return {t.name: rng.standard_normal(t.shape, np.float32).astype(dtype) for t in shapes}


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder: Path, config, tensors, *, shards: int = 1) -> Path:
    """A Hugging Face folder, its tensors dealt out to ``shards`` files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    home = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(home.values()):
        save_file({name: tensors[name] for name in tensors if home[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    return folder


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    _, _, index, local = name.split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[local.removesuffix('.weight')]}.weight"


def permuted(weight, head_dim):
    """The rows as llama.cpp's converter orders those of q and k."""
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, config, tensors, *, kinds=None, leave_out=(), metadata=None, extra=None, stored=None, split=0
) -> Path:
    """A GGUF file of ``tensors``, each matrix quantised as ``kinds`` says by GGUF name (float32 otherwise).

    ``extra`` adds tensors by their GGUF names, ``stored`` adds ``(bytes, type)`` as they are. With ``split`` the model
    goes to parts of so many tensors, as the ``gguf`` package names them.
    """
    shape = ModelConfig.from_hf(config)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name, value in {**tensors, **(extra or {})}.items():
        theirs = name if extra and name in extra else gguf_name(name)
        if theirs in leave_out:
            continue
        if theirs.endswith(("attn_q.weight", "attn_k.weight")):
            value = permuted(value, shape.head_dim)
        kind = (kinds or {}).get(theirs)
        writer.add_tensor(theirs, value if kind is None else quantize(value, kind), raw_dtype=kind)
    for theirs, (content, kind) in (stored or {}).items():
        writer.add_tensor(theirs, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_whole(checkpoint, name, **kwargs):
    """A tensor put together from its pieces, which must follow each other without gaps."""
    parts, end = [], 0
    for start, values in checkpoint.pieces(name, **kwargs):
        assert start == end and values.ndim == 1
        parts.append(values)
        end += values.size
    return np.concatenate(parts).reshape(checkpoint.tensors[name].shape)
