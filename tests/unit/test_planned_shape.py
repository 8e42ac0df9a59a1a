# SPDX-License-Identifier: Apache-2.0
"""Shapes of models are the published ones, and what training does not know can still be planned."""

from __future__ import annotations

from typing import Any

import pytest

from memascend_jax.errors import DataError
from memascend_jax.models.known_shapes import known_config, known_names
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import layer_shapes, parameter_count

#: From the safetensors metadata of each model's repository.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4-mini": 3_836_021_760,
    "phi4-14b": 14_659_507_200,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def small(model_type: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "model_type": model_type, **more}


def test_every_known_model_has_the_published_number_of_parameters() -> None:
    counts = {name: parameter_count(planned_shape(known_config(name)).config) for name in known_names()}
    assert counts == PUBLISHED


def test_what_training_knows_has_no_note_and_the_rest_says_why() -> None:
    for name in known_names():
        assert planned_shape(known_config(name)).notes == (), name
    (note,) = planned_shape(small("mixtral", num_local_experts=4)).notes
    assert "training does not know this model yet" in note
    assert "mixtral" in note
    (note,) = planned_shape(small("qwen2", rope_scaling={"rope_type": "dynamic"})).notes
    assert "rope type 'dynamic' is not known here" in note


def test_a_misspelled_name_gets_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean llama3-8b"):
        known_config("lama3-8b")
    with pytest.raises(DataError, match="known are smollm2-135m"):
        known_config("zzzz")
    assert known_config("Llama3-8B") == known_config("llama3-8b")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (small("qwen2"), {"self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (32,)}),
        (
            small("qwen3", head_dim=32),
            {"self_attn.q_norm.weight": (32,), "self_attn.q_proj.weight": (128, 64)},
        ),
        (small("llama", attention_bias=True), {"self_attn.o_proj.bias": (64,)}),
        (small("llama", mlp_bias=True), {"mlp.gate_proj.bias": (160,), "mlp.down_proj.bias": (64,)}),
        (small("gemma2", head_dim=16), {"pre_feedforward_layernorm.weight": (64,)}),
        (small("gemma3_text", head_dim=16), {"self_attn.k_norm.weight": (16,)}),
        (small("phi3"), {"self_attn.qkv_proj.weight": (128, 64), "mlp.gate_up_proj.weight": (320, 64)}),
        (small("mixtral", num_local_experts=3), {"block_sparse_moe.experts.2.w2.weight": (64, 160)}),
    ],
)
def test_a_layer_has_the_tensors_of_its_architecture(config: dict[str, Any], expected: Any) -> None:
    shapes = layer_shapes(planned_shape(config).config)
    assert expected.items() <= shapes.items()
    assert "input_layernorm.weight" in shapes


def test_transformers_agrees_on_every_architecture() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    configs = [
        small("llama", attention_bias=True, mlp_bias=True),
        small("mistral"),
        small("gemma", head_dim=16),
        small("gemma2", head_dim=16),
        small("gemma3_text", head_dim=16),
        small("phi3", pad_token_id=0),
        small("qwen2"),
        small("qwen3", head_dim=32),
    ]
    for config in configs:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        assert parameter_count(planned_shape(config).config) == model.num_parameters(), config["model_type"]


def test_experts_that_a_token_does_not_see_are_idle() -> None:
    config = small("mixtral", num_local_experts=8, num_experts_per_tok=2)
    shape = planned_shape(config)
    experts = 2 * 8 * 3 * 160 * 64
    assert shape.idle_elements == experts * 6 // 8
    assert planned_shape(small("qwen2")).idle_elements == 0


def test_published_mixture_of_experts_is_counted_whole() -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    assert parameter_count(planned_shape(config).config) == 46_702_792_704
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    assert parameter_count(planned_shape(config).config) == 30_532_122_624


def test_an_unknown_architecture_is_planned_as_llama_and_says_so() -> None:
    shape = planned_shape(small("foundation"))
    assert "its layers are taken to be Llama's" in shape.notes[-1]
    with pytest.raises(DataError, match="the shape of its experts is not known"):
        planned_shape(small("foundation", num_experts=4))


def test_the_text_part_of_a_config_with_several_counts() -> None:
    assert planned_shape({"model_type": "x", "text_config": small("llama")}).notes == ()


def test_missing_sizes_are_named() -> None:
    config = small("qwen2")
    del config["hidden_size"]
    with pytest.raises(DataError, match="hidden_size"):
        planned_shape(config)
