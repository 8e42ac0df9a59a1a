# SPDX-License-Identifier: Apache-2.0
"""The main job killed again and again, and what it leaves compared with an undisturbed run's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from memascend_jax.observe.metrics import read_lines
from memascend_jax.storage.tensor_store import TensorStore

#: What a step reports of its mathematics, as opposed to its time.
EXACT = ("step", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped_steps", "tokens")

#: From a fault to the end of the process.
LONGEST_S = 30.0
#: (operation, number, moment): see ``run_forks``.
End = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves of its mathematics, tensors by name as digests; and the time of a step."""

    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    store: dict[str, str]
    exported: dict[str, str]
    step_s: float


class Runs:
    """Runs of a recipe, forked from one process that has everything imported."""

    def __init__(
        self, *settings: str, config: str = "tiny_random", initial_scale: float | None = None
    ) -> None:
        self._initial_scale = initial_scale
        self._process = -1
        self._logs = tempfile.TemporaryDirectory(prefix="memascend-logs-")
        self._settings = ["--config", config, "offload.direct_io=optional", *settings]
        self._forks = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("run_forks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forks.communicate()
        self._logs.cleanup()

    def log(self, folder: Path) -> Path:
        """Returns the file with what the runs in ``folder`` have said: not in it, for its disk may be full."""
        return Path(self._logs.name, f"{folder.parent.name}-{folder.name}.log")

    def start(self, folder: Path, *overrides: str, end: End | None = None) -> int:
        """Starts a run and returns its process id; ``wait`` must follow."""
        assert self._forks.stdin is not None
        arguments = [*self._settings, f"run.dir={folder}", *overrides]
        log = str(self.log(folder))
        request = {"arguments": arguments, "log": log, "end": end, "initial_scale": self._initial_scale}
        self._forks.stdin.write(json.dumps(request) + "\n")
        process = int(self._read())
        # The number alone may be another process's by the time it is used.
        self._process = os.pidfd_open(process)
        self._forks.stdin.write("\n")
        return process

    def wait(self) -> int:
        """Returns the exit status of the run that was started; less than 0: the signal that killed it."""
        status = int(self._read())
        os.close(self._process)
        self._process = -1
        return status

    def fail(self, folder: Path, *overrides: str, end: End | None = None) -> tuple[int, str]:
        """Carries a run out that must fail, soon and with one clear message; returns its status and that message."""
        began = time.monotonic()
        self.start(folder, *overrides, end=end)
        return self.failed(folder, began)

    def failed(self, folder: Path, began: float) -> tuple[int, str]:
        """Waits for the run that must fail since ``began`` of ``time.monotonic``; returns its status and message."""
        status, log = self.wait(), self.log(folder).read_text()
        assert time.monotonic() - began < LONGEST_S
        assert "Traceback" not in log, log
        message = log.strip().splitlines()[-1]
        assert message.startswith("memascend: "), log
        return status, message

    def wait_for_step(self, folder: Path, step: int) -> None:
        """Returns when the run that was started has written the line of ``step``."""
        metrics = folder / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            assert time.monotonic() < deadline, self.log(folder).read_text()
            time.sleep(0.002)

    def finish(self, folder: Path, *overrides: str) -> None:
        """Carries a run out to its end."""
        self.start(folder, *overrides)
        status = self.wait()
        assert status == 0, self.log(folder).read_text()

    def kill_at(self, folder: Path, end: End, *overrides: str) -> bool:
        """Goes on until the process kills itself, or to the end of the run: then False is returned."""
        self.start(folder, *overrides, end=end)
        return self._was_killed(folder, self.wait())

    def kill_after(self, folder: Path, delay_s: float, *overrides: str, began: bool = True) -> bool:
        """Kills the run ``delay_s`` after it began to train (else: to run); False when it has ended before."""
        process = self.start(folder, *overrides)
        if began:
            _wait_for(folder, process)
        time.sleep(delay_s)
        self.signal(signal.SIGKILL)
        return self._was_killed(folder, self.wait())

    def signal(self, number: int) -> None:
        """Sends a signal to the run; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def _was_killed(self, folder: Path, status: int) -> bool:
        assert status in (0, -signal.SIGKILL), self.log(folder).read_text()
        return status != 0

    def _read(self) -> str:
        assert self._forks.stdout is not None
        line = self._forks.stdout.readline()
        assert line, "the forking process has ended"
        return line


def _wait_for(folder: Path, process: int) -> None:
    """Returns when ``process`` trains, or has ended."""
    status = folder / "status.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            told = json.loads(status.read_text())
            if told["pid"] == process and told["state"] != "starting":
                return
        except (OSError, ValueError):
            pass
        if not Path(f"/proc/{process}/stat").exists():
            return
        time.sleep(0.001)


def exact_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns what the metrics of the run in ``folder`` say of its mathematics."""
    return [{key: line[key] for key in EXACT} for line in read_lines(folder / "metrics.jsonl")]


def outcome(folder: Path) -> Outcome:
    """Returns what the finished run in ``folder`` has left."""
    lines = exact_lines(folder)
    summary = json.loads((folder / "summary.json").read_text())
    with TensorStore.open([folder / "memascend.store"], read_only=True, direct_io="optional") as store:
        tensors = {name: _digest(store.get(name)) for name in store.names()}
    exported = {
        name: _digest(np.asarray(value))
        for name, value in load_file(folder / "export" / "model.safetensors").items()
    }
    kept = ("step", "tokens", "eval_loss_before", "eval_loss_after", "eval_losses", "loss_first", "loss_last")
    step_s = float(summary.get("step_seconds_median", 0.0))
    return Outcome(lines, {key: summary[key] for key in kept}, tensors, exported, step_s)


def _digest(values: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


def check_same(folder: Path, expected: Outcome) -> None:
    """The run in ``folder`` has left what an undisturbed one has: every line once, every tensor bit for bit."""
    got = outcome(folder)
    assert got.lines == expected.lines
    assert got.summary == expected.summary
    assert got.exported == expected.exported
    assert got.store.keys() == expected.store.keys()
    for name, value in expected.store.items():
        assert got.store[name] == value, name
