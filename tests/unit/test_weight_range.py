# SPDX-License-Identifier: Apache-2.0
"""Weights that float16 cannot hold are refused by name before a run has a folder or a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import hf_config, random_tensors, write_folder

from memascend_jax.config import load_config
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes import finetune
from memascend_jax.recipes.inputs import ModelSource, open_model
from memascend_jax.recipes.weight_range import check_weight_range, needs_look

NAME = "model.layers.1.mlp.down_proj.weight"


def model_with(folder: Path, value: float, dtype: Any = np.float32) -> Path:
    shape = hf_config()
    tensors = random_tensors(shape, dtype)
    with np.errstate(over="ignore"):
        tensors[NAME].reshape(-1)[7] = value
    return write_folder(folder, shape, tensors)


def opened(folder: Path, dtype: str = "float16") -> ModelSource:
    return open_model(
        load_config([], [f"model.source={folder}", f"model.compute_dtype={dtype}", "data.seq_len=32"])
    )


def look(folder: Path) -> list[str]:
    model, seen = opened(folder), list[str]()
    check_weight_range(model, tensor_shapes(model.config), str(folder), seen.append)
    model.close()
    return seen


def test_what_rounds_to_the_largest_float16_is_taken(tmp_path: Path) -> None:
    seen = look(model_with(tmp_path / "model", -65519.0))
    assert NAME in seen and len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-65520.0, "up to 65,520"), (1e6, r"up to 1e\+06"), (np.nan, "1 value that is inf or nan")],
)
def test_what_is_beyond_is_refused_with_its_size(tmp_path: Path, value: float, expected: str) -> None:
    with pytest.raises(DataError, match=rf"'{NAME}' has .*{expected}.*Use model.compute_dtype=bfloat16"):
        look(model_with(tmp_path / "model", value))


def test_only_float16_weights_that_were_not_float16_are_looked_at(tmp_path: Path) -> None:
    for dtype, stored, expected in (
        ("float16", np.float32, True),
        ("float16", np.float16, False),
        ("bfloat16", np.float32, False),
    ):
        model = opened(model_with(tmp_path / f"{dtype}{np.dtype(stored)}", 1.0, stored), dtype)
        assert needs_look(model, dtype) == expected
        model.close()


def test_nothing_is_written_before_the_refusal(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a few words to learn from"}\n' * 8)
    config = load_config(
        [],
        [
            f"model.source={model_with(tmp_path / 'model', 1e5)}",
            "model.compute_dtype=float16",
            f"data.source={data}",
            "data.seq_len=16",
            f"run.dir={tmp_path / 'run'}",
            "offload.direct_io=optional",
        ],
    )
    with pytest.raises(DataError, match="values of up to 100,000"):
        finetune.run(config)
    assert not (tmp_path / "run").exists()
