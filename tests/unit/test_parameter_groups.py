# SPDX-License-Identifier: Apache-2.0
"""Parameter groups: the first match decides, what it leaves out is the run's, and none is without effect."""

from __future__ import annotations

import pytest

from memascend_jax.config import load_config
from memascend_jax.config.sections import OptimizerSection
from memascend_jax.errors import ConfigError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes.parameter_groups import frozen_tensors, tensor_settings
from memascend_jax.training.update import TensorSettings

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TENSORS = tensor_shapes(ModelConfig.from_hf(SHAPE))


def optimizer(*groups: str) -> OptimizerSection:
    return load_config(
        [],
        [
            "optimizer.learning_rate=1e-3",
            "optimizer.weight_decay=0.1",
            f"optimizer.groups=[{', '.join(groups)}]",
        ],
    ).optimizer


def test_without_groups_norms_are_not_decayed() -> None:
    settings = tensor_settings(optimizer(), TENSORS)
    assert settings["model.layers.0.input_layernorm.weight"] == TensorSettings(0.0)
    assert settings["model.layers.0.mlp.up_proj.weight"] == TensorSettings(0.1)
    assert list(settings) == [tensor.name for tensor in TENSORS]


def test_the_first_match_decides_and_what_it_leaves_out_is_the_runs() -> None:
    settings = tensor_settings(
        optimizer(
            "{match: embed, learning_rate: 5e-4}",
            "{match: 'layers[.]0[.]', weight_decay: 0.3}",
            "{match: up_proj, learning_rate: 0, weight_decay: 0}",
        ),
        TENSORS,
    )
    assert settings["model.embed_tokens.weight"] == TensorSettings(0.1, 0.5)
    assert settings["model.layers.0.mlp.up_proj.weight"] == TensorSettings(0.3)
    assert settings["model.layers.0.input_layernorm.weight"] == TensorSettings(0.3)
    assert settings["model.layers.1.mlp.up_proj.weight"] == TensorSettings(0.0, 0.0)
    assert settings["model.layers.1.mlp.down_proj.weight"] == TensorSettings(0.1)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["{match: nothing_like_it}"], r"groups\[0\] decides about no parameter.*'nothing_like_it'.*no name"),
        (["{match: 'layers[.]1[.]mlp[.]up_porj'}"], r"nearest are 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (["{match: '^embeding', frozen: true}"], r"nearest are 'model\.embed_tokens\.weight'"),
        (["{match: proj}", "{match: up_proj}"], r"groups\[1\].*2 names, all of which an earlier group"),
    ],
)
def test_a_group_without_effect_is_refused(groups: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        tensor_settings(optimizer(*groups), TENSORS)


def test_frozen_tensors_have_no_settings_and_an_earlier_group_keeps_its_own_trained() -> None:
    section = optimizer(
        "{match: 'layers[.]1[.]mlp', learning_rate: 1e-4}", "{match: 'layers|embed', frozen: true}"
    )
    trained = [
        *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert list(tensor_settings(section, TENSORS)) == trained
    assert frozen_tensors(section.groups, [tensor.name for tensor in TENSORS]) == {
        tensor.name for tensor in TENSORS
    } - set(trained)


def test_a_model_of_frozen_tensors_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"freezes all 21 tensors of the model.*nothing to train"):
        tensor_settings(optimizer("{match: '[.]', frozen: true}"), TENSORS)


def test_a_frozen_group_with_a_learning_rate_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"groups\[0\] is frozen: true, but has a learning_rate"):
        optimizer("{match: embed, frozen: true, learning_rate: 1e-3}")


def test_layer_decay_multiplies_the_rate_of_each_layer_and_of_groups() -> None:
    section = optimizer("{match: 'layers[.]0[.]mlp', learning_rate: 5e-4}")
    section = section.model_copy(update={"layer_decay": 0.5})
    factors = {
        name: settings.learning_rate_factor for name, settings in tensor_settings(section, TENSORS).items()
    }
    assert factors["lm_head.weight"] == factors["model.norm.weight"] == 1.0
    assert factors["model.layers.1.mlp.up_proj.weight"] == 0.5
    assert factors["model.layers.0.self_attn.q_proj.weight"] == 0.25
    assert factors["model.layers.0.mlp.up_proj.weight"] == 0.25 * 0.5
    assert factors["model.embed_tokens.weight"] == 0.125
