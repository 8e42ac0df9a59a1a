# SPDX-License-Identifier: Apache-2.0
"""A model of 6 GB goes into a store and out of it in a small part of its memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny_checkpoints import hf_config, write_tokenizer

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.dtypes import BF16
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import parameter_count, tensor_shapes

pytestmark = [pytest.mark.slow, pytest.mark.integration]

GB = 10**9
#: Measured 170 to 300 MB.
MOST_RESIDENT = 500 << 20
CONFIG = hf_config(
    vocab_size=64_000,
    hidden_size=2560,
    intermediate_size=8960,
    num_hidden_layers=34,
    num_attention_heads=20,
    num_key_value_heads=5,
    head_dim=128,
)
POOL = (np.random.default_rng(0).standard_normal(1 << 23, np.float32) * 0.02).astype(BF16)


def read(name: str, start: int, n: int) -> np.ndarray:
    """Elements of the model: a stretch of a pool of random numbers, another one for every tensor and piece."""
    first = (start + sum(name.encode()) * 4099) % (POOL.size - n)
    return POOL[first : first + n]


def peak_of(*arguments: str) -> int:
    """Runs ``memascend`` and returns the most memory it had resident, in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "memascend_jax.cli", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.timeout(1200)
def test_a_model_of_6_gb_goes_through_a_store_in_little_memory(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 14 * GB:
        pytest.skip("takes 14 GB of disk")
    shape = ModelConfig.from_hf(CONFIG)
    assert 2 * parameter_count(shape) > 6 * GB
    (tmp_path / "files").mkdir()
    write_tokenizer(tmp_path / "files")
    files = {"tokenizer.json": (tmp_path / "files" / "tokenizer.json").read_bytes()}
    folder, store, out = tmp_path / "model", tmp_path / "m.store", tmp_path / "out"
    export_huggingface(read, tensor_shapes(shape), "bfloat16", shape, files, folder, max_shard_bytes=2 * GB)
    assert len(list(folder.glob("model-*.safetensors"))) == 4
    assert peak_of("import", str(folder), str(store)) < MOST_RESIDENT
    shutil.rmtree(folder)
    assert peak_of("export", str(store), str(out), "--max-shard-size=3GB") < MOST_RESIDENT
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) == 3
    names: list[str] = []
    for shard in shards:
        with safe_open(shard, "numpy") as file:
            names += file.keys()
    assert sorted(names) == sorted(tensor.name for tensor in tensor_shapes(shape))
