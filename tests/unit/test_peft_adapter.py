# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's layout: written, read back, refused with every fault; and merged into a model's weights."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from memascend_jax.checkpoints.peft_adapter import export_adapter, open_adapter
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import DataError
from memascend_jax.models.adapters import is_adapter, model_tensors, plan_adapters
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.recipes.adapter_merge import merge_adapters
from memascend_jax.recipes.export_source import ExportSource

KEYS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE = ModelConfig.from_hf(KEYS)
ADAPTERS = plan_adapters(SHAPE, 4, alpha=6.0, rslora=False, targets=["q_proj", "down_proj"])
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
}


def values(shape: ModelConfig = SHAPE, adapters=ADAPTERS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = model_tensors(shape, adapters)
    return {tensor.name: rng.standard_normal(tensor.shape, np.float32) for tensor in tensors}


def write(folder, held=None, dtype="float32", adapters=ADAPTERS, shape=SHAPE):
    held = held or values(shape, adapters)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]

    def read(name, start, n):
        return held[name].reshape(-1)[start : start + n].astype(kind)

    told = []
    export_adapter(read, dtype, shape, adapters, FILES, "org/name", folder, on_tensor=told.append)
    assert told == [name for name in held if is_adapter(name)]
    return held


def test_the_folder_is_peft_s(tmp_path) -> None:
    held = write(tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    # PEFT and transformers take the model and how it generates from the base.
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert set(stored) == {f"base_model.model.{name}" for name in held if is_adapter(name)}
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    np.testing.assert_array_equal(stored[f"base_model.model.{name}"], held[name])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": ["down_proj", "q_proj"],
        "base_model_name_or_path": "org/name",
    }
    assert expected.items() <= config.items()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_reads_back(tmp_path, dtype) -> None:
    held = write(tmp_path / "a", dtype=dtype)
    adapter = open_adapter(tmp_path / "a", SHAPE, ADAPTERS)
    for name in filter(is_adapter, held):
        kept = held[name] if dtype == "float32" else held[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(adapter.read(name), kept)
    adapter.close()


def changed(folder, **keys):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_what_others_write_is_read_too(tmp_path) -> None:
    write(tmp_path / "a")
    changed(tmp_path / "a", target_modules=["self_attn.q_proj", "mlp.down_proj"], lora_alpha=6.0, unknown=1)
    open_adapter(tmp_path / "a", SHAPE, ADAPTERS).close()
    changed(tmp_path / "a", target_modules=r".*\.(q|down)_proj")
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file(
        {name.replace(".weight", ".default.weight"): value for name, value in load_file(path).items()}, path
    )
    open_adapter(tmp_path / "a", SHAPE, ADAPTERS).close()


@pytest.mark.parametrize(
    ("keys", "faults"),
    [
        (
            {"r": 8, "lora_alpha": 16, "use_rslora": True},
            ["lora.rank is 4, the adapter's is 8", "lora.alpha is 6", "lora.rslora is false"],
        ),
        (
            {"target_modules": ["q_proj", "o_proj", "lm_head"]},
            ["mlp.down_proj only here; self_attn.o_proj, lm_head only in the adapter"],
        ),
        (
            {"use_dora": True, "bias": "all", "rank_pattern": {"q_proj": 2}},
            ["use_dora is true", 'bias is "all"', "rank_pattern"],
        ),
        ({"peft_type": "IA3", "modules_to_save": ["lm_head"]}, ['peft_type is "IA3"', "modules_to_save is"]),
        ({"target_modules": None}, ["its target_modules are None"]),
        ({"init_lora_weights": "pissa"}, ['init_lora_weights is "pissa"']),
    ],
)
def test_other_settings_are_all_told(tmp_path, keys, faults) -> None:
    write(tmp_path / "a")
    changed(tmp_path / "a", **keys)
    with pytest.raises(DataError, match="cannot use the adapter in") as caught:
        open_adapter(tmp_path / "a", SHAPE, ADAPTERS)
    for fault in faults:
        assert fault in str(caught.value)


def test_an_adapter_of_another_model_is_refused_by_its_tensors(tmp_path) -> None:
    other = replace(SHAPE, hidden_size=64, num_hidden_layers=3)
    write(tmp_path / "a", adapters=ADAPTERS, shape=other)
    with pytest.raises(DataError, match="Nothing was changed") as caught:
        open_adapter(tmp_path / "a", SHAPE, ADAPTERS)
    assert "'model.layers.0.self_attn.q_proj.lora_A.weight' has shape [4, 64], expected [4, 32]" in str(
        caught.value
    )
    smaller = replace(SHAPE, num_hidden_layers=1)
    write(tmp_path / "b")
    with pytest.raises(DataError, match=r"layers\.1\..* is of no layer of this model"):
        open_adapter(tmp_path / "b", smaller, ADAPTERS)
    write(tmp_path / "c", shape=smaller)
    with pytest.raises(DataError, match=r"'model\.layers\.1\.self_attn\.q_proj\.lora_A\.weight' is missing"):
        open_adapter(tmp_path / "c", SHAPE, ADAPTERS)


def test_what_is_no_adapter_is_told(tmp_path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        open_adapter(tmp_path / "none", SHAPE, ADAPTERS)
    with pytest.raises(DataError, match=r"it has no adapter_config\.json"):
        open_adapter(tmp_path, SHAPE, ADAPTERS)
    write(tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(DataError, match="truncated"):
        open_adapter(tmp_path / "a", SHAPE, ADAPTERS)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(DataError, match=r"a pickle \(adapter_model\.bin\)"):
        open_adapter(tmp_path / "a", SHAPE, ADAPTERS)
    (tmp_path / "a" / "adapter_config.json").write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        open_adapter(tmp_path / "a", SHAPE, ADAPTERS)


def test_an_adapter_is_no_model(tmp_path) -> None:
    write(tmp_path / "a")
    with pytest.raises(DataError, match=r"a LoRA adapter in PEFT's layout.*lora\.source="):
        open_checkpoint(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize("step", [7, 32, 50, 1 << 20])
def test_merged_weights_are_the_sum_rounded_once_whatever_the_pieces(step) -> None:
    held = values()
    kept = {name: value.astype(ml_dtypes.bfloat16) for name, value in held.items() if not is_adapter(name)}

    def read(name, start, n, dtype):
        found = kept.get(name, held[name]).reshape(-1)[start : start + n]
        assert dtype in ("float32", "bfloat16")
        return found.astype(np.float32) if dtype == "float32" else found.astype(ml_dtypes.bfloat16)

    tensors = model_tensors(SHAPE, ADAPTERS)
    source = ExportSource(SHAPE, tensors, {}, {}, read, adapters=ADAPTERS)
    merged = merge_adapters(source)
    assert merged.adapters is None
    assert [tensor.name for tensor in merged.shapes] == [tensor.name for tensor in model_tensors(SHAPE, None)]
    for tensor in merged.shapes:
        total = math.prod(tensor.shape)
        for dtype in ("float32", "bfloat16"):
            pieces = [
                merged.read(tensor.name, at, min(step, total - at), dtype) for at in range(0, total, step)
            ]
            got = np.concatenate(pieces).reshape(tensor.shape)
            module = tensor.name.removesuffix(".weight")
            exact = kept[tensor.name].astype(np.float64)
            if f"{module}.lora_A.weight" in held:
                exact += (
                    1.5 * held[f"{module}.lora_B.weight"].astype(np.float64) @ held[f"{module}.lora_A.weight"]
                )
            # float32 sums of four products; bfloat16 keeps 8 bits.
            limit = 1e-5 if dtype == "float32" else 2.0**-8
            assert np.abs(got.astype(np.float64) - exact).max() <= limit * np.abs(exact).max(), tensor.name
