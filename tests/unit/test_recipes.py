# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes: that they load, plan by name alone, and say at their head what the planner says."""

from __future__ import annotations

import json
import re

import pytest

from memascend_jax import cli
from memascend_jax.config import load_config, recipe_path
from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.known_sources import _SHAPES, shape_of_source
from memascend_jax.recipes.recipe_needs import needs_lines

FULL = ("llama3_8b", "llama3_2_1b", "qwen2_5_7b", "qwen3_8b", "mistral_7b", "smollm2_360m", "llama3_70b")
_NUMBER = re.compile(r"\d[\d,.]*(?:e\+\d+)?")
#: The planner gets better; a header may lag a little behind it.
_NEAR = 0.05


def header(name: str) -> list[str]:
    text = recipe_path(name).read_text(encoding="utf-8")
    block = re.search(r"--needs`:\n#\n((?:#   .*\n)+)", text)
    assert block is not None, f"{name}.yaml does not say what it needs"
    return [line.removeprefix("#   ") for line in block[1].splitlines()]


@pytest.mark.parametrize("name", [*FULL, "smollm2_135m", "smollm2_135m_lora"])
def test_the_header_says_what_the_planner_says(name):
    """To make it so: ``memascend plan --config NAME --needs``."""
    said, planned = header(name), needs_lines(load_config([name]))
    assert [_NUMBER.sub("#", line) for line in said] == [_NUMBER.sub("#", line) for line in planned]
    for line, expected in zip(said, planned, strict=True):
        for was, now in zip(_NUMBER.findall(line), _NUMBER.findall(expected), strict=True):
            was, now = (float(number.replace(",", "")) for number in (was, now))
            # Hours and minutes roll over.
            assert was == pytest.approx(now, rel=_NEAR, abs=60 if "time" in line else 0), (line, expected)


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_is_for_full_fine_tuning_of_a_model_of_the_hub(name):
    config = load_config([name])
    assert shape_of_source(config.model.source) is not None
    assert config.model.compute_dtype == "bfloat16"
    assert config.optimizer.clip_norm == 1.0 and config.optimizer.schedule == "cosine"
    assert config.offload.host_memory is not None
    assert config.run.dir == f"runs/{name}"
    positions = known_config(shape_of_source(config.model.source))["max_position_embeddings"]
    assert config.data.seq_len <= positions


def test_a_model_that_is_not_there_is_planned_by_its_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert (
        cli.main(
            ["plan", "--config", "smollm2_360m", "--accelerator", "--json", f"run.dir={tmp_path / 'run'}"]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert "not in the cache; planned by its published shape, smollm2-360m" in captured.err
    assert json.loads(captured.out)["parameters"] == 361_821_120
    assert cli.main(["plan", "model.source=nobody/nothing", f"run.dir={tmp_path / 'run'}"]) == 5
    assert "`hf download nobody/nothing`" in capsys.readouterr().err
    assert cli.main(["plan", "--needs", "model.source=nobody/nothing"]) == 2


def test_every_known_source_has_a_known_shape():
    for shape in _SHAPES.values():
        assert known_config(shape)["hidden_size"] > 0
