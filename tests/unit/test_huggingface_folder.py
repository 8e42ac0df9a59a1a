# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: whole and in shards, and every fault found at open."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from tiny_architectures import VARIANTS
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_folder

from memascend_jax.checkpoints.source import PiecesInOrder, open_checkpoint
from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("max_bytes", [1, 10_000, 8 << 20])
def test_tensors_are_read_in_pieces_of_whole_rows(tmp_path, shards, dtype, max_bytes):
    config = hf_config()
    tensors = random_tensors(config, dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, tensors, shards=shards))
    for name, value in tensors.items():
        assert checkpoint.tensors[name].dtype == np.dtype(dtype).name
        got = read_whole(checkpoint, name, max_bytes=max_bytes)
        np.testing.assert_array_equal(got.view(np.uint8), value.view(np.uint8))
        row_bytes = value[0].nbytes
        assert all(p.nbytes <= max(max_bytes, row_bytes) for _, p in checkpoint.pieces(name, max_bytes))


def test_what_the_model_does_not_use_is_left_alone(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.int64),
        "lm_head.weight": np.ones((2, 2)),
    }
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, {**tensors, **extra}))
    assert checkpoint.tensors.keys() == tensors.keys()


@pytest.mark.parametrize("renamed", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_reads_images_too_the_language_model_is_taken(tmp_path, renamed):
    text = {**VARIANTS["gemma3"], "vocab_size": 288, "architectures": None}
    tensors = random_tensors(text)
    stored = {renamed + name.removeprefix("model."): value for name, value in tensors.items()}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            key: value for key, value in text.items() if key not in ("architectures", "eos_token_id")
        },
        "vision_config": {"hidden_size": 2},
    }
    other = {"vision_tower.layers.0.weight": np.ones(2, np.float32)}
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, {**stored, **other}, shards=2))
    assert checkpoint.tensors.keys() == tensors.keys()
    streamed = {name: [] for name in tensors}
    for name, _, values in checkpoint.stream(dict.fromkeys(tensors, 1000)):
        streamed[name].append(values)
    for name, value in tensors.items():
        np.testing.assert_array_equal(read_whole(checkpoint, name, max_bytes=1000), value)
        np.testing.assert_array_equal(np.concatenate(streamed[name]), value.reshape(-1))
    files = checkpoint.export_files()
    exported = json.loads(files["config.json"])
    assert "model.safetensors.index.json" not in files
    assert (exported["model_type"], exported["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert ModelConfig.from_hf(exported) == ModelConfig.from_hf({**text, "eos_token_id": [1, 106]})


def test_special_tokens_template_and_files_come_along(tmp_path):
    config = hf_config(eos_token_id=[2, 1])
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    named = {"bos_token": {"content": "<s>"}, "unk_token": "<unk>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.special_ids == {"bos": 1, "eos": 2, "pad": 2, "unk": 0}
    assert checkpoint.chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert open_checkpoint(folder).chat_template == "newer"
    files = checkpoint.export_files()
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert json.loads(files["config.json"]) == config


def test_missing_tensors_are_all_named(tmp_path):
    config = hf_config(tie_word_embeddings=False)
    tensors = random_tensors(config)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(DataError, match=r"2 tensors .*layers\.1\.mlp\.up_proj.*lm_head\.weight' is missing"):
        open_checkpoint(write_folder(tmp_path / "model", config, tensors))


def test_integer_weights_are_refused(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = np.ones(256, np.int8)
    with pytest.raises(DataError, match=r"'model\.norm\.weight' is int8, expected one of bfloat16"):
        open_checkpoint(write_folder(tmp_path / "model", config, tensors))


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/part.safetensors", ".."])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, shard):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="names files outside the folder"):
        open_checkpoint(folder)


def test_missing_shards_are_named(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"shards are missing: model-00002-of-00003\.safetensors"):
        open_checkpoint(folder)


def edited_index(folder, **changes):
    """Changes the file that tensors are said to be in; None: the index leaves the tensor out."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"][name] = file
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    path.write_text(json.dumps(index))


def test_every_fault_of_an_index_is_told_at_once(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors, shards=4)
    first, second, third, fourth = (f"model-{n:05}-of-00004.safetensors" for n in (1, 2, 3, 4))
    names = list(tensors)
    edited_index(
        folder, **{names[0]: second, names[1]: "../x.safetensors", names[4]: None, "model.ghost": first}
    )
    (folder / third).write_bytes((folder / third).read_bytes()[:-8])
    (folder / fourth).unlink()
    (folder / fourth).symlink_to(fourth)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(DataError) as caught:
        open_checkpoint(folder)
    for words in (
        "hidden_act is 'relu'",
        "files outside the folder: '../x.safetensors'",
        f"shards are missing: {fourth} (a link to what is not there)",
        f"{third}': tensor",
        "It is truncated",
        f"names tensors that are not there: 'model.ghost' in {first}",
        f"names other files than the tensors are in: '{names[0]}' is in {first}, not in {second}",
    ):
        assert words in str(caught.value), words


def test_a_tensor_that_the_index_leaves_out_is_there_all_the_same(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors, shards=2)
    edited_index(folder, **{"model.norm.weight": None})
    got = read_whole(open_checkpoint(folder), "model.norm.weight")
    np.testing.assert_array_equal(got, tensors["model.norm.weight"])


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config), shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    with pytest.raises(
        DataError, match=r"tensors are in several shards: 'model\.embed_tokens\.weight' in model-00001"
    ):
        open_checkpoint(folder)


def test_faults_of_many_layers_share_a_line(tmp_path):
    config = hf_config(num_hidden_layers=6)
    tensors = random_tensors(config)
    for layer in (0, 1, 2, 5):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    for layer in range(6):
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = np.zeros(256, np.float32)
    tensors["model.layers.3.self_attn.k_proj.weight"] = np.zeros((128, 256), np.int8)
    tensors["vision.patch"] = np.zeros(3, np.float32)
    with pytest.raises(DataError) as caught:
        open_checkpoint(write_folder(tmp_path / "model", config, tensors))
    for words in (
        "12 tensors do not match its config",
        "'model.layers.{0-2,5}.mlp.up_proj.weight' are missing (4 tensors), expected [512, 256]",
        "'model.layers.3.self_attn.k_proj.weight' is int8, expected one of",
        "'model.layers.{0-5}.self_attn.q_proj.bias' are not in the model that its config describes (6 tensors)",
        "'vision.patch' is not in the model that its config describes",
    ):
        assert words in str(caught.value), words


def test_types_are_mixed_as_they_come(tmp_path):
    config = hf_config()
    kinds = {"norm": np.float32, "embed": np.float16}
    tensors = {
        name: value.astype(next((kind for part, kind in kinds.items() if part in name), ml_dtypes.bfloat16))
        for name, value in random_tensors(config).items()
    }
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, tensors))
    for name, value in tensors.items():
        assert checkpoint.tensors[name].dtype == value.dtype.name
        assert read_whole(checkpoint, name).tobytes() == value.tobytes()


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config), shards=2)

    def refuse(path, *arguments):
        if str(path).endswith("00001-of-00002.safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments)

    real = os.open
    monkeypatch.setattr("memascend_jax.checkpoints.positioned_file.os.open", refuse)
    with pytest.raises(
        DataError, match=r"model-00001-of-00002\.safetensors cannot be read: Permission denied"
    ):
        open_checkpoint(folder)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"names tensors that are not there: .*'model\.ghost'"):
        open_checkpoint(folder)


def test_pickles_are_refused_with_the_remedy(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match=r"pickles \(pytorch_model\.bin\).*save_pretrained"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:-1], "ends at byte .* It is truncated"),
        (lambda content: content[:7], "truncated or damaged"),
        (lambda content: content[:100], "its header would have"),
        (
            lambda content: struct.pack("<Q", 1 << 60) + content[8:],
            "its header would have 1,152,921,504,606,846,976",
        ),
        (lambda content: content[:8] + b"x" + content[9:], "its header is malformed"),
        (lambda content: content.replace(b'"F32"', b'"F99"', 1), "dtype 'F99' is not known"),
    ],
    ids=["last_byte", "length", "header", "huge_header", "not_json", "dtype"],
)
def test_a_damaged_file_is_refused_at_open(tmp_path, spoil, message):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "cannot hold shape"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, "no whole number"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            "tensor 'b' lies upon 'a'",
        ),
    ],
    ids=["size", "negative", "overlap"],
)
def test_impossible_places_are_refused(tmp_path, entries, message):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(DataError, match=message):
        open_checkpoint(folder)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"it has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="it is not JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(DataError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_lacks_everything(tmp_path):
    with pytest.raises(DataError, match=r"it has no config\.json; it has neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"consolidated\.safetensors is not what Hugging Face's models are called"
    ):
        open_checkpoint(tmp_path)


def test_links_that_lead_round_are_no_files(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    for name, words in (
        ("model.safetensors", "is a link to what is not there"),
        ("config.json", "no config"),
    ):
        (folder / name).unlink()
        (folder / name).symlink_to(name)
        with pytest.raises(DataError, match=words):
            open_checkpoint(folder)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="there is no such folder or file"):
        open_checkpoint(tmp_path / "loop")


def test_a_source_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot open the model '.*absent'"):
        open_checkpoint(tmp_path / "absent")


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(DataError, match="its config says 1,000,000,000 layers, but it has 20 tensors only"):
        open_checkpoint(folder)


@pytest.mark.parametrize("max_bytes", [1000, 50_000, 1 << 20])
def test_tensors_that_follow_each_other_are_read_ahead_and_the_same(tmp_path, max_bytes):
    config = hf_config(tie_word_embeddings=False)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, tensors, shards=3))
    names = list(checkpoint.tensors)
    pieces = PiecesInOrder(checkpoint, names, max_bytes)

    def whole(name):
        return np.concatenate([values.copy() for _, values in pieces(name)]).reshape(tensors[name].shape)

    # Twice in order, and once not; one of them is given up half way.
    for name in [*names, *names[:3], names[5], names[4], *names]:
        np.testing.assert_array_equal(whole(name), tensors[name])
    next(pieces(names[0]))
    for name in names[1:4]:
        np.testing.assert_array_equal(whole(name), tensors[name])
    checkpoint.close()
