# SPDX-License-Identifier: Apache-2.0
"""The optimizer's measurement at toy size: every contender has its figure, a peer that is not there says so."""

from __future__ import annotations

import json
import sys

import pytest

from memascend_jax._native import _core
from memascend_jax.bench import optimizer


@pytest.fixture(autouse=True)
def _threads():
    before = _core.threads()
    yield
    _core.set_threads(before)


def test_every_case_has_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer.main(["--elements", "3e4", "--norm-bytes", "65536", "--rounds", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["instruction_set"]
    names = {one["contender"] for one in facts["series"]}
    assert {
        "memascend adamw",
        "same loads and stores",
        "fp32",
        "split",
        "split_bf16",
        "bf16",
        "int8",
    } <= names
    assert all(one["median"] > 0 and one["rounds"] == 2 for one in facts["series"])
    roof = next(one for one in facts["series"] if one["contender"] == "same loads and stores")
    assert roof["memascend adamw / this"] > 0


def test_an_interpreter_without_the_peers_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--elements", "4096", "--rounds", "1", "--cases", "fused", "--peers", sys.executable]
    assert optimizer.main(arguments) == 0
    series = json.loads(capsys.readouterr().out)["series"]
    torch = next(one for one in series if one["contender"] == "torch AdamW, fused")
    assert "error" in torch
    assert series[0]["median"] > 0
