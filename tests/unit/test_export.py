# SPDX-License-Identifier: Apache-2.0
"""Exported folders: read back by the safetensors package byte for byte, and all or nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny_checkpoints import hf_config, random_tensors, read_whole

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.checkpoints.source import PIECE_BYTES, open_checkpoint
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.observe.failure import exit_status


class Source:
    """Tensors as a store gives them, counting how much is asked for at a time."""

    def __init__(self, dtype="bfloat16", **changes):
        self.config = ModelConfig.from_hf(hf_config(**changes))
        self.dtype = dtype
        self.tensors = random_tensors(hf_config(**changes), to_dtype(dtype))
        self.largest_bytes = 0

    def read(self, name, start, n):
        piece = self.tensors[name].reshape(-1)[start : start + n].copy()
        self.largest_bytes = max(self.largest_bytes, piece.nbytes)
        return piece

    def export(self, out_dir, files=None, **options):
        shapes = tensor_shapes(self.config)
        export_huggingface(self.read, shapes, self.dtype, self.config, files or {}, out_dir, **options)
        return out_dir


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_byte_equal_to_what_was_read(tmp_path, dtype, tied):
    source = Source(dtype, tie_word_embeddings=tied, vocab_size=20_000)
    out = source.export(tmp_path / "out")
    assert source.largest_bytes <= PIECE_BYTES
    # The package's own reader of bfloat16 needs torch, so bytes are compared through ours after its check.
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == source.tensors.keys()
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 (it is no dict)
        assert file.metadata() == {"format": "pt"}
    checkpoint = open_checkpoint(out)
    for name, value in source.tensors.items():
        np.testing.assert_array_equal(read_whole(checkpoint, name).view(np.uint8), value.view(np.uint8))


def test_large_models_are_written_in_shards(tmp_path):
    source = Source()
    out = source.export(tmp_path / "out", max_shard_bytes=300_000)
    shards = sorted(path.name for path in out.glob("model-*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == source.tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in source.tensors.values())
    checkpoint = open_checkpoint(out)
    for name, value in source.tensors.items():
        np.testing.assert_array_equal(read_whole(checkpoint, name).view(np.uint8), value.view(np.uint8))


def test_files_come_along_and_the_config_names_the_dtype(tmp_path):
    base = {**hf_config(), "some_key": 3, "torch_dtype": "float32"}
    files = {"config.json": json.dumps(base).encode(), "tokenizer.json": b"{}"}
    out = Source().export(tmp_path / "out", files)
    assert (out / "tokenizer.json").read_bytes() == b"{}"
    config = json.loads((out / "config.json").read_text())
    assert config == {**base, "torch_dtype": "bfloat16", "dtype": "bfloat16"}


def test_without_a_config_the_shape_is_written(tmp_path):
    source = Source()
    out = source.export(tmp_path / "out")
    assert ModelConfig.from_hf(json.loads((out / "config.json").read_text())) == source.config


def test_an_existing_folder_is_never_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="it exists already"):
        Source().export(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", Path("/proc/nowhere/out")):
        with pytest.raises(ConfigError, match=f"cannot export to '{out}': .* Choose a place"):
            Source().export(out)


def test_what_a_killed_export_left_is_removed_and_that_of_a_running_one_is_not(tmp_path):
    # Beyond the largest number that Linux gives to a process.
    killed, running = (tmp_path / f".out.partial-{pid}" for pid in (2**22 + 1, os.getppid()))
    for partial in (killed, running):
        partial.mkdir()
        (partial / "model.safetensors").write_text("half")
    Source().export(tmp_path / "out")
    assert not killed.exists()
    assert running.exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(tmp_path, error):
    source = Source()
    calls = []

    def read(name, start, n):
        calls.append(name)
        if len(calls) == 4:
            raise error
        return Source.read(source, name, start, n)

    with pytest.raises(type(error)):
        export_huggingface(
            read, tensor_shapes(source.config), "bfloat16", source.config, {}, tmp_path / "out"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("memascend_jax.checkpoints.export.os.fsync", full)
    with pytest.raises(
        OSError, match=r"cannot write the export: No space left.*model\.safetensors"
    ) as caught:
        Source().export(tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_folder_is_full_not_misconfigured(tmp_path, monkeypatch, capsys):
    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    assert exit_status(lambda: Source().export(tmp_path / "below" / "out")) == 6
    told = capsys.readouterr().err
    assert str(tmp_path / "below") in told
    assert "bytes are free there" in told


def test_another_dtype_than_promised_is_refused(tmp_path):
    source = Source("float32")
    shapes = tensor_shapes(source.config)
    with pytest.raises(DataError, match=r"expected .* of bfloat16 from element 0, got .* of float32"):
        export_huggingface(source.read, shapes, "bfloat16", source.config, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
