# SPDX-License-Identifier: Apache-2.0
"""Runs go on from stores that were written once more: in another state format, with another vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import Runs, check_same, outcome

from memascend_jax import cli
from memascend_jax.checkpoints.source import open_checkpoint

pytestmark = pytest.mark.integration

STEPS = "train.steps=9"


def store(folder: Path, verb: str, *arguments: str) -> int:
    return cli.main(["store", verb, str(folder / "memascend.store"), *arguments])


def test_a_killed_run_goes_on_in_split_and_back_in_fp32_to_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with Runs(STEPS, "train.eval_every=3") as runs:
        runs.finish(whole)
        assert runs.kill_at(killed, ("line", 3, "after"))
        assert store(killed, "convert", "--state-format=split") == 0
        status, message = runs.fail(killed)
        assert status == 2
        assert "memascend store convert" in message
        assert runs.kill_at(killed, ("line", 3, "before"), "optimizer.state_format=split")
        assert store(killed, "convert", "--state-format=fp32") == 0
        runs.finish(killed)
    check_same(killed, outcome(whole))


def test_a_stopped_run_goes_on_in_8_bits_elsewhere_and_with_more_rows(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere.store"
    with Runs(STEPS) as runs:
        assert runs.kill_at(folder, ("line", 4, "after"))
        assert store(folder, "convert", "--state-format=int8", f"--into={elsewhere}") == 0
        assert cli.main(["store", "resize-vocab", str(elsewhere), "--size=700"]) == 0
        settings = (
            "optimizer.state_format=int8",
            f"offload.store=[{elsewhere}]",
            "model.config.vocab_size=700",
        )
        runs.finish(folder, *settings)
    found = open_checkpoint(folder / "export")
    assert found.config["vocab_size"] == 700
    assert found.tensors["model.embed_tokens.weight"].shape == (700, 64)
    found.close()
    # The old store is as the kill left it.
    assert store(folder, "verify") == 0
