# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every architecture: the config that their metadata make, and a name for every tensor of the model."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from tiny_checkpoints import permuted, random_tensors, read_whole

from memascend_jax.checkpoints.gguf_config import config_from_gguf
from memascend_jax.checkpoints.gguf_names import FAMILIES, gguf_name
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import DataError
from memascend_jax.models.hf_config import config_faults
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import tensor_shapes

SIZES = {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "context_length": 128,
    "vocab_size": 320,
    "rope.freq_base": 5000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
#: What the config of a family has besides, by the published models.
EXPECTED = {
    "llama": {"model_type": "llama", "hidden_act": "silu", "attention_bias": False},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 128,
    },
    "gemma": {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1]},
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 128}


def config_of(architecture: str, names=("output.weight", "a", "b"), read=lambda name: None, **changes):
    values = {**SIZES, **(_EXPERTS if architecture == "qwen3moe" else {}), **changes}
    metadata = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    header = SimpleNamespace(metadata={"general.architecture": architecture, **metadata})
    return config_from_gguf(header, "m.gguf", dict.fromkeys(names), read)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_config_of_a_family_has_its_keys(architecture):
    config = config_of(architecture)
    assert {key: config[key] for key in EXPECTED[architecture]} == EXPECTED[architecture]
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]) == (256, 2, 2)
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 5000.0
    assert config["tie_word_embeddings"] is False
    assert config_of(architecture, ("a", "b"))["tie_word_embeddings"] is True


@pytest.mark.parametrize("architecture", [*FAMILIES, "mixtral"])
def test_every_tensor_of_a_model_has_a_place(architecture):
    found = "llama" if architecture == "mixtral" else architecture
    config = config_of(found, **(_EXPERTS if architecture == "mixtral" else {}))
    assert config["model_type"].startswith(architecture[:5])
    family = FAMILIES[found]
    places = {}
    for tensor in tensor_shapes(planned_shape(config).config):
        place = gguf_name(tensor.name, family)
        assert place is not None, tensor.name
        assert (place.name, place.expert) not in places, tensor.name
        places[place.name, place.expert] = tensor.name


def test_the_largest_gemmas_scale_queries_otherwise():
    sizes = {"embedding_length": 1024, "attention.key_length": 128}
    names = [str(index) for index in range(99)]
    for architecture, largest in (("gemma2", 46), ("gemma3", 62)):
        assert config_of(architecture, names, block_count=largest, **sizes)["query_pre_attn_scalar"] == 256
        assert config_of(architecture, names, block_count=26, **sizes)["query_pre_attn_scalar"] == 128


def test_positions_are_scaled_as_the_file_says():
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    config = config_of("qwen3", **yarn, **{"rope.scaling.original_context_length": 32})
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config["rope_scaling"] == scaled
    assert config["rope_parameters"] == {**scaled, "rope_theta": 5000.0}
    factors = {
        "rope_factors_long.weight": np.float32([1.25, 3.0]),
        "rope_factors_short.weight": np.float32([1.0, 1.1]),
    }
    config = config_of("phi3", read=factors.get, **{"rope.scaling.original_context_length": 64})
    assert config["rope_scaling"]["long_factor"] == [1.25, 3.0] and config["rope_scaling"][
        "short_factor"
    ] == [1.0, 1.1]
    assert config["original_max_position_embeddings"] == 64
    assert config_of("phi3", **{"rope.dimension_count": 48})["partial_rotary_factor"] == 0.75
    config = config_of("gemma3", **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }


def test_metadata_that_make_no_sense_are_all_named():
    with pytest.raises(DataError) as caught:
        config_of("qwen2", block_count=None, **{"rope.freq_base": "fast", "context_length": True})
    for words in (
        "qwen2.block_count is missing",
        "rope.freq_base is 'fast', expected a number",
        "context_length is True",
    ):
        assert words in str(caught.value)
    with pytest.raises(DataError, match=r"qwen2\.block_count is 1,000,000, but it has 3 tensors only"):
        config_of("qwen2", block_count=10**6)


TINY = {"vocab_size": 288, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128}
MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2"},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 1024},
    "phi3": {"model_type": "phi3", "tie_word_embeddings": False},
}


def write_model(path, architecture, config, tensors) -> None:
    """As llama.cpp's converter does: names by the package's table, rotated rows in pairs, Gemma's norms plus one."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in SIZES.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", config["vocab_size"] if key == "vocab_size" else value)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, value in tensors.items():
        if architecture in ("llama", "smollm3") and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = permuted(value, config["head_dim"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        writer.add_tensor(table.get_name(name, try_suffixes=(".weight", ".bias")), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_of_every_family_is_read_in_hugging_faces_order(tmp_path, architecture):
    config = {**TINY, **HEADS, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, **MODELS[architecture]}
    if config_faults(config):
        pytest.skip("the architecture itself is not computed here")
    tensors = random_tensors(config)
    write_model(tmp_path / "m.gguf", architecture, config, tensors)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        for max_bytes in (1, 100_000):
            # One is added and taken away again.
            close = {"rtol": 0, "atol": 5e-7 if architecture.startswith("gemma") else 0}
            np.testing.assert_allclose(
                read_whole(checkpoint, name, max_bytes=max_bytes), value, **close, err_msg=name
            )
    ours, theirs = (ModelConfig.from_hf(each).to_hf() for each in (checkpoint.config, config))
    different = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
    assert different <= {"bos_token_id", "eos_token_id", "pad_token_id", "query_pre_attn_scalar"}
