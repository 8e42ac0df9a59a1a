# SPDX-License-Identifier: Apache-2.0
"""The files of a run in ``run.dir``, each written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from memascend_jax.config import Config, has_store, store_paths, to_yaml
from memascend_jax.errors import ConfigError
from memascend_jax.observe.failure import is_disk_full
from memascend_jax.observe.oom import oom_count, oom_kills_since
from memascend_jax.observe.process import is_gone, this_process
from memascend_jax.observe.whole_file import write_text_whole
from memascend_jax.storage.existing_path import nearest_existing
from memascend_jax.units import counted


class RunFolder:
    """The files that a run leaves in ``run.dir``."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        #: The store that the files belong to; None before it is made, and in a run in memory.
        self.store_id: str | None = None
        #: The run that the files belong to, see ``RunState``; None before it is known.
        self.run_id: str | None = None
        self._stores = [str(path) for path in store_paths(config)] if has_store(config) else []
        self._lock = -1

    def check_is_free(self) -> None:
        """Returns when a new run may write here; writes nothing.

        Raises:
            ConfigError: the folder has files that the run would overwrite.
        """
        present = [name for name in ("metrics.jsonl", "summary.json") if self._has(name)]
        if self._has("config.yaml") and not self._has("status.json"):
            present.append("config.yaml")
        if self.export.exists():
            present.append("export")
        if present:
            status = self._read_status()
            if self._stores and isinstance(status.get("store_id"), str):
                raise ConfigError(
                    f"run.dir={str(self.path)!r} holds the files of a run at step {status.get('step')}, but its store "
                    f"is not at {', '.join(self._stores)}; nothing was changed. Give the place of the store "
                    "(offload.store) to go on, or choose another run.dir to start anew"
                )
            raise ConfigError(
                f"cannot start a new run in run.dir={str(self.path)!r}: it holds {', '.join(present)} of something "
                "else, which would be overwritten; choose another run.dir, or move them away"
            )

    @property
    def has_results(self) -> bool:
        """Whether a run has ended here."""
        return self._has("summary.json")

    def check_is_of(self, store_id: str, started_in: str, *, finished: bool) -> None:
        """Returns when the folder is that of the run in a store, or free for one that goes on; writes nothing.

        Args:
            store_id: the store.
            started_in: ``run.dir`` of the run when it began.
            finished: whether the run is complete, so that nothing would be written here.

        Raises:
            ConfigError: it holds the files of another run, or the complete run's files are elsewhere.
        """
        owner, home = self.owners()[1], Path(started_in).expanduser()
        if owner == store_id or (owner is None and home.resolve() == self.path.resolve()):
            self.store_id = store_id
            return
        if owner is not None:
            raise ConfigError(
                f"run.dir={str(self.path)!r} holds the files of another run than the store does; nothing was changed. "
                f"The run in the store began with run.dir={str(home)!r}"
                + ("" if finished else "; give that one, or a new one")
            )
        if finished:
            raise ConfigError(
                f"the run in the store is complete, but run.dir={str(self.path)!r} is not its folder: it began with "
                f"run.dir={str(home)!r}. Give that one; for the model alone there is memascend export"
            )
        self.check_is_free()
        self.store_id = store_id

    def check_writable(self) -> None:
        """Returns when the folder, or the one it would be made in, can be written; writes nothing.

        Raises:
            ConfigError: it is not a folder, or this user may not write there.
        """
        place = nearest_existing(self.path)
        if not place.is_dir():
            raise self._unwritable(f"{str(place)!r} is not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise self._unwritable(f"{str(place)!r} is read-only, or not yours to write")

    def prepare(self, config: Config, plan: dict[str, Any], step: int, total_steps: int) -> None:
        """Makes the folder and writes ``status.json``, ``config.yaml`` and ``plan.json``.

        Raises:
            ConfigError: the folder cannot be written, or another run is using it.
            OSError: its disk is full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            # The status first: it tells a later start that the other files are a run's.
            self.write_status("starting", step, total_steps)
            self._write("config.yaml", to_yaml(config))
            self._write("plan.json", _json_text(plan))
        except OSError as error:
            if is_disk_full(error):
                raise
            raise self._unwritable(error.strerror or str(error)) from error

    def _take(self) -> None:
        """Makes the folder this process's own, until it ends: two runs would write each other's files.

        Raises:
            ConfigError: another process has it.
        """
        if self._lock >= 0:
            return
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no locks on folders.
            if error.errno != errno.EWOULDBLOCK:
                return
            holder = self._read_status().get("pid")
            raise ConfigError(
                f"run.dir={str(self.path)!r} is in use by another run"
                + (f", process {holder}" if holder else "")
                + "; wait for its end, or choose another run.dir"
            ) from error

    def release(self) -> None:
        """Lets go of the folder; does nothing when it was never taken."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def compile_cache(self) -> Path:
        return self.path / "compile_cache"

    @property
    def meter(self) -> Path:
        return self.path / "meter.jsonl"

    def trace(self, *, compressed: bool) -> Path:
        return self.path / ("trace.json.gz" if compressed else "trace.json")

    def write_status(self, state: str, step: int, total_steps: int, message: str = "") -> None:
        """Says what the run is doing: ``starting`` or ``running``.

        Raises:
            OSError: the file cannot be written, with its path; the one before is still there.
        """
        self._write("status.json", self._status(state, step, total_steps, message))

    def write_last_status(self, state: str, step: int, total_steps: int, message: str = "") -> None:
        """Says how the run ended: ``stopped``, ``interrupted``, ``failed`` or ``done``.

        A failure to do so is not raised: it would hide how the run ended.
        """
        text = self._status(state, step, total_steps, message)
        try:
            self._write("status.json", text)
        except OSError:
            # A full disk still has the blocks of the file that is there.
            with contextlib.suppress(OSError), open(self.path / "status.json", "r+b", buffering=0) as file:
                file.truncate(file.write(text.encode()))

    def likely_oom_kill(self) -> str | None:
        """Returns a sentence when the last run here ended as one that the kernel killed for lack of memory does."""
        status = self._read_status()
        if status.get("state") not in ("starting", "running") or not is_gone(status):
            return None
        kills = oom_kills_since(status)
        if not kills:
            return None
        return (
            f"the last run ended at step {status.get('step')} without a word, and since then the kernel has killed "
            f"{counted(kills, 'process', 'processes')} for lack of memory: probably that run. To avoid it give it a "
            "smaller offload.host_memory, or the machine or its memory cgroup more room"
        )

    def keep_results(self, step: int) -> str:
        """Gives the results of a complete run another name, for a longer one to have its own; returns the names.

        Raises:
            OSError: the folder cannot be written.
        """
        kept = []
        for name in ("export", "summary.json"):
            path, stem = self.path / name, Path(name)
            other = path.with_name(f"{stem.stem}_step_{step}{stem.suffix}")
            if path.exists() and not other.exists():
                path.rename(other)
                kept.append(other.name)
        return " and ".join(kept) or "there are none"

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", _json_text(summary))

    def _status(self, state: str, step: int, total_steps: int, message: str) -> str:
        return _json_text(
            {
                "state": state,
                "step": step,
                "total_steps": total_steps,
                **this_process(),
                **oom_count(),
                "unix_time": round(time.time(), 3),
                "message": message,
                "store_id": self.store_id,
                "run_id": self.run_id,
            }
        )

    def owners(self) -> tuple[str | None, str | None]:
        """Returns the run and the store whose files these are; None where nothing, or nothing readable, says so."""
        status = self._read_status()
        run, store = status.get("run_id"), status.get("store_id")
        return run if isinstance(run, str) else None, store if isinstance(store, str) else None

    def _read_status(self) -> dict[str, Any]:
        """The contents of ``status.json``; nothing where there is none, or nothing readable."""
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def _unwritable(self, why: str) -> ConfigError:
        return ConfigError(
            f"cannot write to run.dir={str(self.path)!r}: {why}; choose a folder you may write to"
        )

    def _has(self, name: str) -> bool:
        path = self.path / name
        return path.exists() and path.stat().st_size > 0

    def _write(self, name: str, text: str) -> None:
        write_text_whole(self.path / name, text, "a file of the run")


def _json_text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
