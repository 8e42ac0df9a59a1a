# SPDX-License-Identifier: Apache-2.0
"""What a run folder says about its run, finished or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.overlap import phase_overlaps
from memascend_jax.observe.process import is_gone
from memascend_jax.observe.step_figures import step_figures
from memascend_jax.observe.trace_file import find_trace, read_events

SCHEMA = 1


def read_run(folder: Path) -> dict[str, Any]:
    """Returns ``status``, ``summary``, the number of metrics lines, and the ``overlap`` of computing and I/O of a run.

    Before a run has written its ``summary.json`` the summary holds what its plan and its metrics tell so far. The
    ``state`` of a run whose process ended without saying so is ``died``. Without a trace the overlap is empty.

    Raises:
        DataError: the folder is not one of a run, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"cannot report on '{folder}': it is not a folder; give the run.dir of a run")
    status, summary = _read_json(folder / "status.json"), read_summary(folder)
    metrics = folder / "metrics.jsonl"
    lines = read_lines(metrics) if metrics.is_file() else []
    drains = read_lines(metrics, drain=True) if metrics.is_file() else []
    if status is None and summary is None and not lines:
        raise DataError(
            f"cannot report on '{folder}': it holds no status.json, summary.json or metrics.jsonl; give the run.dir"
            " of a run"
        )
    if status and status.get("state") in ("starting", "running") and is_gone(status):
        status = {**status, "state": "died", "message": f"there is no process {status['pid']} any more"}
    return {
        "schema": SCHEMA,
        "run_dir": str(folder),
        "status": status or {},
        "summary": summary or _so_far(folder, lines, drains),
        "steps_recorded": len(lines),
        "overlap": _overlap(folder),
    }


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the figures of the finished run in ``folder``, or None when it has not finished or they are gone."""
    return _read_json(folder / "summary.json")


def _overlap(folder: Path) -> list[dict[str, Any]]:
    path = find_trace(folder)
    return [] if path is None else [one.to_json() for one in phase_overlaps(read_events(path))]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"cannot read '{path}': expected a JSON object")
    return value


def _so_far(folder: Path, lines: list[dict[str, Any]], drains: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what ``summary.json`` would have of a run that has not ended: what was planned, and its steps."""
    if not lines:
        return {}
    plan = _read_json(folder / "plan.json") or {}
    planned = {
        "parameters": plan.get("parameters"),
        "planned_ssd_read_bytes_per_step": plan.get("ssd_read_bytes_per_step"),
        "planned_ssd_write_bytes_per_step": plan.get("ssd_write_bytes_per_step"),
    }
    return {**planned, **lines[-1], **step_figures(lines, drains)}
