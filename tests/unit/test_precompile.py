# SPDX-License-Identifier: Apache-2.0
"""Compiling apart: once for what a run computes, and again for anything else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.optim.state_format import state_format
from memascend_jax.training.model_layout import plan_layout
from memascend_jax.training.precompile import precompile_apart


def test_a_full_cache_is_not_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [1, 0, 0]
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        return subprocess.CompletedProcess(command, statuses[len(started) - 1], b"", b"no")

    monkeypatch.setattr(subprocess, "run", run)
    layout = plan_layout(
        planned_shape(known_config("smollm2-135m")).config,
        state_format("fp32", "bfloat16"),
        target_tile_elements=1 << 20,
        target_head_bytes=1 << 23,
    )
    assert not precompile_apart(layout, (1, 64), 1, tmp_path)
    assert precompile_apart(layout, (1, 64), 1, tmp_path)
    assert precompile_apart(layout, (1, 64), 1, tmp_path)
    assert len(started) == 2
    assert precompile_apart(layout, (1, 128), 1, tmp_path)
    assert len(started) == 3
