# SPDX-License-Identifier: Apache-2.0
"""A run that is traced and metered: every byte and stage of its steps is on the timeline, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memascend_jax.observe.meter_log import read_meter
from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.report import read_run
from memascend_jax.observe.run_charts import run_charts
from memascend_jax.observe.trace_file import read_events

pytestmark = pytest.mark.integration

STEPS = 4
OVERRIDES = (f"train.steps={STEPS}", "offload.direct_io=optional", "run.export=false")


def run(folder: Path, *overrides: str) -> Path:
    program = [sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"]
    done = subprocess.run(
        [*program, f"run.dir={folder}", *OVERRIDES, *overrides], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced") / "run"
    return run(folder, "run.trace=true", "run.trace_gzip=true", "run.meter_seconds=0.05")


@pytest.fixture(scope="module")
def events(traced: Path) -> list[Any]:
    return list(read_events(traced / "trace.json.gz"))


def of(events: list[Any], category: str) -> list[Any]:
    return [event for event in events if event.get("cat") == category]


def test_every_byte_that_the_store_moved_is_on_the_timeline(traced: Path, events: list[Any]) -> None:
    series = read_meter(traced / "meter.jsonl")
    for category, column in (("read", "ssd_read"), ("write", "ssd_written")):
        recorded = sum(event["args"]["bytes"] for event in of(events, category))
        counted = max(value or 0 for one in series for value in one.columns.get(column, [0]))
        # The store's last commit and its closing come after the last sample.
        assert counted <= recorded <= counted * 1.02 + (1 << 20)
    assert list(read_events(traced / "trace.json.gz"))[-1]["args"] == {"count": 0}


def test_every_stage_of_every_step_was_computed_in_its_phase(events: list[Any]) -> None:
    phases = Counter(event["name"] for event in of(events, "phase"))
    assert phases["forward"] == phases["backward"] == STEPS
    assert phases["update"] == STEPS
    backward = sorted(event["ts"] for event in of(events, "phase") if event["name"] == "backward")
    computed = of(events, "compute")
    micro_batches = 2
    for layer in range(3):
        names = " ".join(event["name"] for event in computed)
        # A computation whose results were donated is one event with the next, under both names.
        assert names.count(f"layer_backward layer.{layer}") == STEPS * micro_batches
    first = min(event["ts"] for event in computed if "layer_backward" in event["name"])
    assert first >= backward[0]


def test_tiles_copies_and_waits_are_there(events: list[Any]) -> None:
    updated = [event["name"] for event in of(events, "update")]
    assert sum(name.startswith("update model.layers.0") for name in updated) == STEPS
    assert sum(name.startswith("update model.embed_tokens") for name in updated) == STEPS
    assert {"host_to_device", "device_to_host"} <= {event["name"] for event in of(events, "copy")}
    assert any(event["name"].startswith("for the flush of") for event in of(events, "wait"))
    assert Counter(event["name"] for event in of(events, "phase"))["commit"] >= STEPS


def test_the_report_tells_the_overlap_and_draws_all_four_figures(traced: Path) -> None:
    report = read_run(traced)
    assert {one["phase"] for one in report["overlap"]} == {"forward", "backward", "update", "commit"}
    for one in report["overlap"]:
        assert 0 <= one["overlap"] <= 1
        assert one["both_s"] <= min(one["compute_s"], one["io_s"]) + 1e-6
        assert max(one["compute_s"], one["io_s"]) <= one["seconds"] + 1e-6
    titles = [chart.title for chart in run_charts(traced, report["summary"])]
    assert titles == ["Host memory", "Time of a step", "SSD bandwidth", "Loss"]


def test_the_meter_saw_the_arena_by_what_it_is_for(traced: Path) -> None:
    (series,) = (one for one in read_meter(traced / "meter.jsonl") if "device" in one.columns)
    plan = json.loads((traced / "plan.json").read_text())
    assert sum(series.facts["arena_bytes"].values()) == plan["arena_bytes"]
    assert series.facts["budget_bytes"] == plan["budget_host_bytes"]
    for kind in ("layer", "update", "spool"):
        leased = [value for value in series.columns[f"leased:{kind}"] if value is not None]
        assert max(leased) <= series.facts["arena_bytes"][kind]
    assert max(value or 0 for value in series.columns["leased:update"]) > 0
    assert max(value or 0 for value in series.columns["device"]) > 0


def test_a_trace_changes_no_result(traced: Path, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    assert not (plain / "trace.json").exists()
    assert (plain / "meter.jsonl").exists()
    losses = [[line["loss"], line["grad_norm"]] for line in read_lines(traced / "metrics.jsonl")]
    assert losses == [[line["loss"], line["grad_norm"]] for line in read_lines(plain / "metrics.jsonl")]
