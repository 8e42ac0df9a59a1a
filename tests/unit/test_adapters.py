# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as tensors: which layers have one, what they begin as, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from memascend_jax.checkpoints.random_init import new_factor
from memascend_jax.config import load_config
from memascend_jax.errors import ConfigError
from memascend_jax.models.adapters import (
    Adapters,
    adapters_from_json,
    is_adapter,
    model_tensors,
    plan_adapters,
)
from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes.lora import adapters_of, base_name
from memascend_jax.recipes.parameter_groups import frozen_tensors, tensor_settings
from memascend_jax.recipes.planning import plan_config

SHAPE = ModelConfig.from_hf(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
QV = ("self_attn.q_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def planned(*targets: str, rank: int = 4, shape: ModelConfig = SHAPE) -> Adapters:
    return plan_adapters(shape, rank, alpha=8.0, rslora=False, targets=targets)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ((), QV),
        (("v_proj", "self_attn.q_proj"), QV),
        ((r"mlp\..*",), MLP),
        (
            ("all-linear",),
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *MLP),
        ),
    ],
)
def test_targets_are_names_their_ends_or_patterns(targets, modules) -> None:
    assert planned(*targets).modules == modules


def test_fused_and_routed_layers_have_what_is_usual_too() -> None:
    phi = planned_shape({**known_config("llama3-8b"), "model_type": "phi3"}).config
    assert planned(shape=phi).modules == ("self_attn.qkv_proj",)
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1}
    mixtral = planned_shape({**known_config("mistral-7b"), "model_type": "mixtral", **sizes}).config
    modules = planned("all-linear", shape=mixtral).modules
    assert "block_sparse_moe.experts.1.w2" in modules
    assert "block_sparse_moe.gate" not in modules


@pytest.mark.parametrize(
    "target", ["q_pro", "input_layernorm", "lm_head", "layers.0.self_attn.q_proj", "proj"]
)
def test_a_target_that_matches_nothing_is_told_with_what_there_is(target: str) -> None:
    with pytest.raises(
        ConfigError, match=f"'{target}' is found in no linear layer.*self_attn.q_proj, .*mlp.down"
    ):
        planned("v_proj", target)


def test_a_rank_larger_than_a_layer_names_the_layers() -> None:
    assert planned(rank=32).rank == 32
    with pytest.raises(
        ConfigError, match=r"lora.rank=33 is more than a dimension of self_attn.v_proj \[32, 64\]"
    ):
        planned(rank=33)


def test_factors_stand_behind_the_tensors_of_their_layer() -> None:
    tensors = model_tensors(SHAPE, planned("q_proj"))
    own = [tensor for tensor in tensors if not is_adapter(tensor.name)]
    assert own == tensor_shapes(SHAPE)
    factors = {tensor.name: (tensor.shape, tensor.stage) for tensor in tensors if is_adapter(tensor.name)}
    assert factors == {
        f"model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight": (shape, f"layer.{layer}")
        for layer in (0, 1)
        for factor, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    stages = [tensor.stage for tensor in tensors]
    assert stages == sorted(stages, key=stages.index)
    assert model_tensors(SHAPE, None) == own


def test_scales_and_json() -> None:
    adapters = planned(rank=16)
    assert adapters.scale == 0.5
    assert Adapters(16, 8.0, True, QV).scale == 2.0
    assert adapters_from_json(adapters.to_json()) == adapters


def test_a_new_factor_is_as_peft_makes_it() -> None:
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    a = new_factor(name, (64, 4096), 3, "kaiming")
    bound = 4096**-0.5
    assert -bound <= a.min() < -0.999 * bound
    assert 0.999 * bound < a.max() <= bound
    assert abs(a.mean()) < bound / 100
    assert abs(a.std() / (bound / 3**0.5) - 1) < 0.01
    assert abs(new_factor(name, (64, 4096), 3, "gaussian").std() * 64 - 1) < 0.01
    assert np.array_equal(a, new_factor(name, (64, 4096), 3, "kaiming"))
    for other in (
        new_factor(name, (64, 4096), 4, "kaiming"),
        new_factor("b.lora_A.weight", (64, 4096), 3, "kaiming"),
    ):
        assert not np.array_equal(a, other)
    assert not new_factor("x.lora_B.weight", (8, 4), 0, "kaiming").any()


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert adapters_of(load_config([], []).lora, SHAPE) is None
    lora = load_config([], ["lora.rank=4", "lora.targets=[q_proj]"]).lora
    assert adapters_of(lora, SHAPE) == Adapters(4, 8.0, False, ("self_attn.q_proj",))
    lora = load_config([], ["lora.rank=4", "lora.alpha=5", "lora.rslora=true"]).lora
    assert adapters_of(lora, SHAPE) == Adapters(4, 5.0, True, QV)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.rank=-1"], "lora.rank"),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha"),
        (["lora.rank=4", "lora.alpha=-2"], "lora.alpha"),
        (["lora.rank=4", "lora.dropout=0.1"], "lora.dropout=0.1 is not available"),
        (["lora.rank=4", "lora.targets=['q_proj(']"], "not a regular expression"),
        (
            ["lora.targets=[q_proj]", "lora.alpha=4"],
            r"lora.alpha is set, but lora.rank=0(.|\n)*lora.targets is set",
        ),
        (["lora.rank=4", "model.add_tokens=['<a>']"], "model.add_tokens changes the embedding"),
        (["lora.rnak=4"], "did you mean 'lora.rank'"),
    ],
)
def test_settings_that_make_no_adapters_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], overrides)


def groups(*texts: str):
    return load_config(
        [],
        [
            "optimizer.learning_rate=1e-3",
            "optimizer.weight_decay=0.1",
            f"optimizer.groups=[{', '.join(texts)}]",
        ],
    ).optimizer


def test_groups_are_about_the_factors_and_all_else_is_frozen() -> None:
    tensors = model_tensors(SHAPE, planned())
    names = [tensor.name for tensor in tensors]
    settings = tensor_settings(
        groups("{match: lora_B, learning_rate: 1.6e-2}", "{match: 'layers[.]0', frozen: true}"), tensors
    )
    trained = [name for name in names if is_adapter(name) and ("lora_B" in name or "layers.1" in name)]
    assert list(settings) == trained
    assert settings["model.layers.0.self_attn.q_proj.lora_B.weight"].learning_rate_factor == 16
    assert settings["model.layers.1.self_attn.q_proj.lora_A.weight"].learning_rate_factor == 1
    assert settings["model.layers.1.self_attn.q_proj.lora_A.weight"].weight_decay == 0.1
    frozen = frozen_tensors(groups("{match: 'layers[.]0[.].*lora_A', frozen: true}").groups, names)
    assert frozen == set(names) - set(trained)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            "{match: norm, learning_rate: 1e-4}",
            "only in tensors of the model itself .*which are frozen beside adapters",
        ),
        ("{match: lora_C}", "found in no name; the nearest are .*lora_"),
        ("{match: '.', frozen: true}", "freezes all 8 factors of the adapters"),
    ],
)
def test_a_group_that_would_train_the_model_beside_adapters_is_refused(group: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tensor_settings(groups(group), model_tensors(SHAPE, planned()))


def test_a_step_of_lora_writes_less_than_a_hundredth_of_full_fine_tuning() -> None:
    """SmolLM2 at rank 16: the writes are those of the trained parameters, block by block."""
    shape = ModelConfig.from_hf(known_config("smollm2-135m"))

    def plan(*settings: str):
        return plan_config(
            load_config([], ["offload.placement=ssd", *settings]), shape, n_examples=0, this_machine=False
        )

    full, lora = plan(), plan("lora.rank=16")
    assert lora.layout.n_trained == 30 * 16 * (2 * 576 + 576 + 192)
    assert lora.ssd_write_bytes_per_step < 0.01 * full.ssd_write_bytes_per_step
    # The model is in one place, and nothing but the factors has state.
    own = 2 * full.layout.n_parameters
    assert own < lora.disk_bytes < 1.2 * own
    assert lora.memory.total_bytes < full.memory.total_bytes
    # The model is read twice but for what is still there, of the table also rows.
    assert own < lora.ssd_read_bytes_per_step < 2 * own
    everything = plan("lora.rank=16", "lora.targets=[all-linear]")
    ratio = everything.ssd_write_bytes_per_step / full.ssd_write_bytes_per_step
    assert abs(ratio / (everything.layout.n_trained / full.layout.n_trained) - 1) < 0.1


def test_with_memory_for_the_layers_a_step_reads_rows_and_what_is_trained() -> None:
    shape = ModelConfig.from_hf(known_config("smollm2-135m"))
    plan = plan_config(
        load_config(
            [], ["offload.placement=ssd", "offload.host_memory=2GiB", "lora.rank=16", "data.seq_len=64"]
        ),
        shape,
        n_examples=0,
        this_machine=False,
    )
    # Nothing of the model but 64 rows; state that stays is not read either.
    assert plan.ssd_read_bytes_per_step < 64 * 8192 + 16 * plan.layout.n_trained
    assert plan.capacity["layer"] == 30


def test_what_an_adapter_is_loaded_beside_has_a_name(tmp_path) -> None:
    assert base_name("random") is None
    assert base_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_name("org/name") == "org/name"
    assert base_name(str(tmp_path / "a" / ".." / "model")) == str(tmp_path / "model")
    snapshot = tmp_path / "models--org--its-name" / "snapshots" / "abc"
    assert base_name(str(snapshot)) == "org/its-name"
