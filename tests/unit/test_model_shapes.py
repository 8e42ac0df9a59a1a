# SPDX-License-Identifier: Apache-2.0
"""Shapes from a config: the same as the modules', and a refusal of everything that is not computed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_architectures import VARIANTS

from memascend_jax.errors import DataError
from memascend_jax.models.hf_config import known_keys
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import (
    layer_shapes,
    parameter_count,
    stage_names,
    tensor_shapes,
)

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 2}


def test_smollm2_has_its_published_number_of_parameters():
    config = ModelConfig.from_hf(SMOLLM2)
    assert parameter_count(config) == 134_515_008
    assert len(tensor_shapes(config)) == 272
    untied = ModelConfig.from_hf({**SMOLLM2, "tie_word_embeddings": False})
    assert parameter_count(untied) == 134_515_008 + 49152 * 576
    assert tensor_shapes(untied)[-1].name == "lm_head.weight"


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_the_modules(variant):
    import jax
    from flax import nnx

    from memascend_jax.models.decoder_layer import DecoderLayer
    from memascend_jax.models.matmul import plan_precision

    config = ModelConfig.from_hf(VARIANTS[variant])
    precision = plan_precision("float32")
    module = nnx.eval_shape(lambda: DecoderLayer(config, precision, 256))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    assert found == layer_shapes(config)


def test_every_tensor_belongs_to_a_stage_in_forward_order():
    config = ModelConfig.from_hf({**SMOLLM2, "num_hidden_layers": 2})
    assert stage_names(config) == ["embed", "layer.0", "layer.1", "head"]
    assert list(dict.fromkeys(tensor.stage for tensor in tensor_shapes(config))) == stage_names(config)


@pytest.mark.parametrize("eos", [None, 2, [2, 3]])
def test_a_config_survives_writing_and_reading(eos):
    config = ModelConfig.from_hf({**SMOLLM2, "eos_token_id": eos, "rope_theta": 1e5, "rms_norm_eps": 1e-5})
    assert config.rope_theta == 1e5 and config.head_dim == 64
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_left_out_keys_have_hugging_faces_defaults():
    config = ModelConfig.from_hf(
        {
            key: SMOLLM2[key]
            for key in (
                *("vocab_size", "hidden_size", "intermediate_size"),
                *("num_hidden_layers", "num_attention_heads"),
            )
        }
    )
    assert (config.num_key_value_heads, config.rope_theta, config.rms_norm_eps) == (9, 10000.0, 1e-6)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["OlmoForCausalLM"]}, "architecture 'OlmoForCausalLM' is not known here"),
        ({"model_type": "bert"}, "architecture 'bert' is not known here; known are 'LlamaForCausalLM', "),
        ({"model_type": ["llama"]}, r"architecture \['llama'\] is not known here"),
        (
            {"architectures": "GemmaForCausalLM"},
            "'GemmaForCausalLM' and model_type 'llama' do not go together",
        ),
        (
            {"text_config": {"model_type": "mllama_text_model"}},
            "its text_config, 'mllama_text_model', is not known",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected keys with values"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor is missing, rope type 'llama3'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing, rope type 'linear' needs it"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, expected a positive number"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope type 'dynamic' is not known here; known are 'default'",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' is not known here"),
        ({"rope_scaling": LONGROPE}, "long_factor has 2 numbers, expected 32: one for each pair"),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": 2}},
            "short_factor is 2, expected a list of positive numbers",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu6"}, "hidden_act is 'relu6', known are 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, only 1 is computed here"),
        ({"quantization_config": {}}, "the weights are quantised"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is not a multiple of num_key_value_heads 2"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 576 is not a multiple"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive whole number"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a positive number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta is -1\.0, expected a positive number"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(change, message):
    with pytest.raises(DataError, match=message):
        ModelConfig.from_hf({**SMOLLM2, **change})


def test_an_unknown_architecture_is_reported_once():
    with pytest.raises(DataError) as caught:
        ModelConfig.from_hf({**SMOLLM2, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    assert str(caught.value).count("is not known here") == 1
    assert "'GPT2LMHeadModel' / 'gpt2'" in str(caught.value)


def test_all_faults_are_listed_at_once():
    with pytest.raises(DataError) as caught:
        ModelConfig.from_hf(
            {
                **SMOLLM2,
                "hidden_act": "?",
                "head_dim": 63,
                "num_key_value_heads": 2,
                "rope_scaling": {"type": "x"},
            }
        )
    parts = ("hidden_act", "head_dim 63 is odd", "num_key_value_heads 2", "rope type 'x'")
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a positive whole number"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has to be a list of 3 names"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked", "full_attention"]},
            "layer_types has 'chunked'",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "there is no window: see use_sliding_window"),
        ("qwen2-window", {"max_window_layers": -1}, "max_window_layers is -1"),
        (
            "gemma3",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1,000,000,000, more than any model has",
        ),
        ("qwen2", {"use_mrope": True}, "use_mrope is True, only False is computed here"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers has to be a list of 0 or 1 for each of the 3 layers",
        ),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("gemma2", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma2", {"attn_logit_softcapping": -5.0}, r"attn_logit_softcapping is -5\.0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "gemma3",
            {"attn_logit_softcapping": 50.0},
            r"attn_logit_softcapping is 50\.0, only null is computed here",
        ),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma3", {"rope_local_base_freq": -1}, "rope_theta is -1 of sliding_attention"),
        (
            "gemma3",
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope type 'dynamic' of full_attention is not known",
        ),
        (
            "gemma3",
            {"rope_parameters": {"rope_theta": 1.0}},
            "expected 'full_attention' and 'sliding_attention'",
        ),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not known here"),
        ("phi3", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5, expected a number above 0"),
        ("phi4-mini", {"partial_rotary_factor": 0.4}, r"0\.4 rotates 3 elements of a head"),
        ("phi4-mini", {"partial_rotary_factor": 0.5}, "short_factor has 3 numbers, expected 2"),
    ],
)
def test_faults_of_an_architecture_are_named(variant, change, message):
    with pytest.raises(DataError, match=message):
        ModelConfig.from_hf({**VARIANTS[variant], **change})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_survives_writing_and_reading(variant):
    config = ModelConfig.from_hf(VARIANTS[variant])
    written = config.to_hf()
    assert ModelConfig.from_hf(written) == config
    assert not written.keys() - known_keys(written)
    assert not VARIANTS[variant].keys() - known_keys(VARIANTS[variant])


def test_older_names_of_longrope_are_read():
    newer = VARIANTS["phi4-mini"]
    for name in ("su", "yarn"):
        older = {**newer, "rope_scaling": {**newer["rope_scaling"], "type": name, "rope_type": None}}
        assert ModelConfig.from_hf(older) == ModelConfig.from_hf(newer)


def test_layers_that_differ_are_told_apart():
    gemma = ModelConfig.from_hf(VARIANTS["gemma3"])
    assert [kind.window for kind in gemma.kind_list()] == [5, None, 5]
    assert [kind.rope.theta for kind in gemma.kind_list()] == [10.0, 1000.0, 10.0]
    smollm = ModelConfig.from_hf(VARIANTS["smollm3"])
    assert [kind.rope is None for kind in smollm.kind_list()] == [False, True, False]
    mistral = ModelConfig.from_hf(VARIANTS["mistral"])
    assert (len(mistral.kinds), mistral.layer_kinds) == (1, ())


def test_models_that_earlier_versions_knew_keep_their_identity():
    config = ModelConfig.from_hf({**SMOLLM2, "rope_theta": 1e5, "eos_token_id": 2})
    known = {name: SMOLLM2[name] for name in SMOLLM2.keys() - {"architectures", "model_type"}}
    assert config.identity() == known | {
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e5,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    json.dumps(ModelConfig.from_hf(VARIANTS["phi4-mini"]).identity())
    identities = [json.dumps(ModelConfig.from_hf(config).identity()) for config in VARIANTS.values()]
    assert len(set(identities)) == len(VARIANTS)


def test_null_is_no_window_and_a_window_left_out_is_hugging_faces():
    config = VARIANTS["mistral"]
    assert ModelConfig.from_hf({**config, "sliding_window": None}).window is None
    del (left_out := dict(config))["sliding_window"]
    assert ModelConfig.from_hf(left_out).window == 4096


@pytest.mark.parametrize(
    "module",
    [
        "models.shapes",
        "models.hf_config",
        "checkpoints.source",
        "checkpoints.random_init",
        "checkpoints.export",
    ],
)
def test_importing_costs_no_jax(module):
    code = f"import sys, memascend_jax.{module}; sys.exit('jax' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
