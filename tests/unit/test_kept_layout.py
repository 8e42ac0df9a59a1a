# SPDX-License-Identifier: Apache-2.0
"""A model that is read and written again, with nothing trained, is the same files."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import hf_config, random_tensors, write_folder, write_tokenizer

from memascend_jax import cli
from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.checkpoints.model_files import is_passed_on
from memascend_jax.checkpoints.shard_layout import Entry, plan_shards
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
#: Files of real folders, with what they hold: nobody reads most of them here.
BESIDE = {
    "generation_config.json": b'{"eos_token_id": [2, 1]}',
    "tokenizer_config.json": b'{ "bos_token": "<s>" }',
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": "{{ messages }} ü ∀".encode(),
    "chat_template.json": b'{"chat_template": "x"}',
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "tokenizer.model.v3": b"\x00\x01",
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "preprocessor_config.json": b"{}",
    "LICENSE": b"terms",
    "USE_POLICY.md": b"more terms",
}


def mixed(config) -> dict[str, np.ndarray]:
    """Three types in one model, as some have that keep their norms in float32."""
    types = {"norm": F32, "embed": F16}
    return {
        name: value.astype(next((dtype for part, dtype in types.items() if part in name), BF16))
        for name, value in random_tensors(config).items()
    }


def write_shards(folder: Path, config, tensors, home: dict[str, str]) -> None:
    """As ``save_pretrained`` writes them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2) + "\n")
    write_tokenizer(folder)
    for file in set(home.values()):
        part = {name: tensors[name] for name in tensors if home[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def exported(tmp_path, source, *options: str) -> dict[str, bytes]:
    assert cli.main(["export", str(source), str(tmp_path / "out"), *options]) == 0
    return contents(tmp_path / "out")


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A folder whose files are cut as nobody here would cut them."""
    config = hf_config(tie_word_embeddings=False)
    tensors = mixed(config)
    home = {name: f"part-{'abc'[index * 7 % 3]}.safetensors" for index, name in enumerate(tensors)}
    write_shards(tmp_path / "model", config, tensors, home)
    for name, content in BESIDE.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


def test_every_file_comes_out_as_it_was(tmp_path, sharded):
    before = contents(sharded)
    for name in ("README.md", "pytorch_model.bin", "onnx/model.onnx", "notes.txt"):
        (sharded / name).parent.mkdir(exist_ok=True)
        (sharded / name).write_bytes(b"not for export")
    assert exported(tmp_path, sharded) == before


def test_a_model_that_went_through_a_store_comes_out_as_it_was(tmp_path, sharded):
    before = contents(sharded)
    assert cli.main(["import", str(sharded), str(tmp_path / "m.store")]) == 0
    assert exported(tmp_path, tmp_path / "m.store") == before


def test_a_single_file_comes_out_as_it_was(tmp_path):
    config = hf_config(torch_dtype="float16")
    tensors = random_tensors(config, F16)
    folder = write_folder(tmp_path / "model", config, tensors)
    assert exported(tmp_path, folder) == contents(folder)


def test_another_type_changes_what_it_must_and_no_more(tmp_path, sharded):
    before, after = contents(sharded), exported(tmp_path, sharded, "--dtype=float32")
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    index = "model.safetensors.index.json"
    assert changed == {"config.json", index, *(name for name in before if name.startswith("part-"))}
    old, new = json.loads(before[index]), json.loads(after[index])
    assert old["weight_map"] == new["weight_map"]
    assert new["metadata"]["total_size"] > 1.5 * old["metadata"]["total_size"]
    assert json.loads(after["config.json"])["dtype"] == "float32"


def test_a_size_that_is_asked_for_wins_over_the_files_that_were(tmp_path, sharded):
    after = exported(tmp_path, sharded, "--max-shard-size=500KB")
    assert not any(name.startswith("part-") for name in after)
    assert "model-00001-of-" in "".join(after)


def test_what_was_trained_goes_to_the_file_that_it_came_from(tmp_path):
    """An export of a run: other values, other types, a head that is no longer tied."""
    config = ModelConfig.from_hf(hf_config(num_hidden_layers=1, tie_word_embeddings=False))
    shapes = tensor_shapes(config)
    home = {shape.name: f"x-{index % 2}.safetensors" for index, shape in enumerate(shapes[:-1])}
    index = json.dumps(
        {"metadata": {"total_size": 1, "format": "pt"}, "weight_map": home | {"gone": "x-9.safetensors"}}
    ).encode()
    export_huggingface(
        lambda name, start, n: np.ones(n, BF16),
        shapes,
        "bfloat16",
        config,
        {"model.safetensors.index.json": index},
        tmp_path / "out",
    )
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == home | {shapes[-1].name: "x-9.safetensors"}
    assert written["metadata"] == {"total_size": 2 * sum(shape.elements for shape in shapes), "format": "pt"}


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "../b"}}',
        b'{"weight_map": {"a": 3}}',
    ],
)
def test_an_index_that_makes_no_sense_decides_nothing(index):
    layout = plan_shards([Entry("a", "float32", (3,))], index)
    assert list(layout.files) == ["model.safetensors"] and layout.index is None


def test_files_that_lead_elsewhere_are_not_passed_on():
    assert is_passed_on("LICENSE.txt") and is_passed_on("additional_chat_templates/a.jinja")
    for name in (
        "../LICENSE",
        "a/LICENSE",
        "/LICENSE",
        "tokenizer/../../x",
        "..",
        "model.safetensors",
        "tokenizers\0",
    ):
        assert not is_passed_on(name)
