# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: whole and in shards, and every fault found at open."""

from __future__ import annotations

import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_folder

from memascend_jax.checkpoints.source import PiecesInOrder, open_checkpoint
from memascend_jax.errors import DataError


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
    with pytest.raises(DataError, match=r"'model\.norm\.weight' is int8; expected one of bfloat16"):
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
