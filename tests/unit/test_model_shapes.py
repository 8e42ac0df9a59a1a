# SPDX-License-Identifier: Apache-2.0
"""Shapes from a config: the same as the modules', and a refusal of everything that is not computed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memascend_jax.errors import DataError
from memascend_jax.models.shapes import (
    LlamaConfig,
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


def test_smollm2_has_its_published_number_of_parameters():
    config = LlamaConfig.from_hf(SMOLLM2)
    assert parameter_count(config) == 134_515_008
    assert len(tensor_shapes(config)) == 272
    untied = LlamaConfig.from_hf({**SMOLLM2, "tie_word_embeddings": False})
    assert parameter_count(untied) == 134_515_008 + 49152 * 576
    assert tensor_shapes(untied)[-1].name == "lm_head.weight"


def test_shapes_are_those_of_the_modules():
    import jax
    from flax import nnx

    from memascend_jax.models.llama_layer import DecoderLayer
    from memascend_jax.models.matmul import plan_precision

    config = LlamaConfig.from_hf(SMOLLM2)
    precision = plan_precision("float32")
    module = nnx.eval_shape(lambda: DecoderLayer(config, precision, 256))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    assert found == layer_shapes(config)


def test_every_tensor_belongs_to_a_stage_in_forward_order():
    config = LlamaConfig.from_hf({**SMOLLM2, "num_hidden_layers": 2})
    assert stage_names(config) == ["embed", "layer.0", "layer.1", "head"]
    assert list(dict.fromkeys(tensor.stage for tensor in tensor_shapes(config))) == stage_names(config)


@pytest.mark.parametrize("eos", [None, 2, [2, 3]])
def test_a_config_survives_writing_and_reading(eos):
    config = LlamaConfig.from_hf({**SMOLLM2, "eos_token_id": eos, "rope_theta": 1e5, "rms_norm_eps": 1e-5})
    assert config.rope_theta == 1e5 and config.head_dim == 64
    assert LlamaConfig.from_hf(config.to_hf()) == config


def test_left_out_keys_have_hugging_faces_defaults():
    config = LlamaConfig.from_hf(
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
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture 'Qwen2ForCausalLM' is not known here"),
        ({"model_type": "gemma"}, "architecture 'gemma' is not known here"),
        ({"architectures": "GemmaForCausalLM"}, "architecture 'GemmaForCausalLM' is not known here"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected keys with values"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3' is not known here"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is computed here"),
        ({"attention_bias": True}, "attention_bias is True"),
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
        LlamaConfig.from_hf({**SMOLLM2, **change})


def test_an_unknown_architecture_is_reported_once():
    with pytest.raises(DataError) as caught:
        LlamaConfig.from_hf({**SMOLLM2, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    assert str(caught.value).count("is not known here") == 1
    assert "'GPT2LMHeadModel' / 'gpt2'" in str(caught.value)


def test_all_faults_are_listed_at_once():
    with pytest.raises(DataError) as caught:
        LlamaConfig.from_hf({**SMOLLM2, "hidden_act": "gelu", "vocab_size": -1, "mlp_bias": True})
    assert all(part in str(caught.value) for part in ("hidden_act", "vocab_size is -1", "mlp_bias"))


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
