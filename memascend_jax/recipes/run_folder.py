# SPDX-License-Identifier: Apache-2.0
"""The files of a run in ``run.dir``, each written whole or not at all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from memascend_jax.config import Config, to_yaml
from memascend_jax.errors import RunError


class RunFolder:
    """``config.yaml``, ``plan.json``, ``status.json``, ``summary.json``, ``metrics.jsonl`` and ``export/`` of a run."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write("config.yaml", to_yaml(config))
        except OSError as error:
            raise RunError(
                f"cannot write to run.dir={str(self.path)!r}: {error.strerror}; choose a folder you may write to"
            ) from error

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def compile_cache(self) -> Path:
        return self.path / "compile_cache"

    def write_plan(self, plan: dict[str, Any]) -> None:
        self._write_json("plan.json", plan)

    def write_status(self, state: str, step: int, total_steps: int, message: str = "") -> None:
        """Says what the run is doing: ``starting``, ``running``, ``stopped``, ``failed`` or ``done``."""
        self._write_json(
            "status.json",
            {
                "state": state,
                "step": step,
                "total_steps": total_steps,
                "pid": os.getpid(),
                "unix_time": round(time.time(), 3),
                "message": message,
            },
        )

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write_json("summary.json", summary)

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        self._write(name, json.dumps(values, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        draft = self.path / f".{name}.new"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path / name)
