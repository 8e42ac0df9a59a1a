# SPDX-License-Identifier: Apache-2.0
"""Where a run's checkpoints go and what they take, found out before a weight is read. jax-free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from memascend_jax.checkpoints.array_layout import state_arrays
from memascend_jax.checkpoints.saved_step import find_steps, is_checkpoint
from memascend_jax.config import Config, has_store, store_paths
from memascend_jax.errors import BudgetError, ConfigError
from memascend_jax.memory.budget import Consumer
from memascend_jax.models.shapes import TensorShape
from memascend_jax.optim.state_format import StateFormat
from memascend_jax.storage.device import block_device_bytes, resolve_paths
from memascend_jax.storage.existing_path import nearest_existing
from memascend_jax.units import MIB, counted, format_bytes

#: Orbax with what it imports, and the threads that write; measured: "Checkpoints" in docs/experiment_log.md.
LIBRARY_BYTES = 48 * MIB


def checkpoint_folder(config: Config) -> Path:
    """Returns ``checkpoint.dir``, or its default in ``run.dir``."""
    folder = config.checkpoint.dir
    return Path(config.run.dir).expanduser() / "checkpoints" if folder is None else Path(folder).expanduser()


def saves_checkpoints(config: Config) -> bool:
    """Returns whether the run is to save any."""
    return bool(config.checkpoint.every)


def checkpoint_consumers(config: Config) -> list[Consumer]:
    """Returns what saving takes of host memory besides the slots of the update, through which the state goes."""
    if not saves_checkpoints(config):
        return []
    return [Consumer("runtime", "checkpoints", LIBRARY_BYTES, "orbax and what it imports, measured")]


@dataclass(frozen=True, slots=True)
class CheckpointSpace:
    """The disk space of a run's checkpoints.

    Attributes:
        every: steps between two.
        step_bytes: of one.
        kept: steps that are kept at most; one more is there while it is written.
        present: steps that are there already, and will be replaced.
        on_store_disk: whether they share the store's disk.
    """

    folder: Path
    every: int
    step_bytes: int
    kept: int
    present: int
    on_store_disk: bool

    @property
    def total_bytes(self) -> int:
        """Bytes of the kept steps and the one being written."""
        return self.step_bytes * (self.kept + 1)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that are written for a step of the run, on average."""
        return self.step_bytes / self.every

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be found on the disk."""
        return self.step_bytes * max(self.kept + 1 - self.present, 0)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free where they go."""
        space = os.statvfs(nearest_existing(self.folder))
        return space.f_bavail * space.f_frsize


def checkpoint_space(
    config: Config,
    fmt: StateFormat,
    tensors: Sequence[TensorShape],
    frozen: Collection[str] = (),
    *,
    this_machine: bool = True,
) -> CheckpointSpace | None:
    """Returns what the checkpoints of a run take, or None when it saves none.

    Args:
        this_machine: whether the paths are of this machine; else nothing is asked of its disks.
    """
    every = config.checkpoint.every
    if not every:
        return None
    folder = checkpoint_folder(config)
    return CheckpointSpace(
        folder,
        every,
        sum(array.file_bytes for array in state_arrays(fmt, tensors, frozen)),
        config.checkpoint.keep + config.checkpoint.keep_best,
        len(find_steps(folder)) if this_machine else 0,
        this_machine and has_store(config) and _shares_disk(folder, config),
    )


def _shares_disk(folder: Path, config: Config) -> bool:
    """Returns whether a file of the store is, or would be, on the disk of ``folder``."""
    disk = nearest_existing(folder).stat().st_dev
    return any(
        block_device_bytes(path) is None and nearest_existing(Path(path)).stat().st_dev == disk
        for path in resolve_paths(store_paths(config))
    )


def check_checkpoint_space(space: CheckpointSpace, store_bytes: int) -> None:
    """Returns when every checkpoint that the run will keep has room.

    Args:
        store_bytes: what the store is still going to take of the same disk, 0 where it is there already.

    Raises:
        BudgetError: there is not enough, with the numbers.
    """
    free, store = space.free_bytes, store_bytes if space.on_store_disk else 0
    if space.missing_bytes + store <= free:
        return
    also = f", besides the {format_bytes(store)} of the store on the same disk" if store else ""
    raise BudgetError(
        f"the run needs {format_bytes(space.missing_bytes)} of disk space for checkpoints in '{space.folder}' "
        f"({counted(space.kept + 1, 'step', 'steps')} of {format_bytes(space.step_bytes)}, of which "
        f"{space.present} are there{also}), but only {format_bytes(free)} are free there: "
        f"{format_bytes(space.missing_bytes + store - free)} are missing. What would help: to free as much, a smaller "
        "checkpoint.keep or keep_best, another disk (checkpoint.dir), or checkpoint.every=0"
    )


def check_checkpoint_folder(config: Config) -> None:
    """Returns when checkpoints can be written where they should go; writes nothing.

    Raises:
        ConfigError: it is not a folder, holds something else, or this user may not write there.
    """
    folder = checkpoint_folder(config)
    place = nearest_existing(folder)
    if not place.is_dir():
        raise _unusable(folder, f"'{place}' is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unusable(folder, f"'{place}' is read-only, or not yours to write")
    if place == folder.absolute():
        own = {str(step) for step in find_steps(folder)}
        foreign = sorted(
            entry.name for entry in folder.iterdir() if entry.name not in own and not _is_harmless(entry.name)
        )
        if foreign:
            raise _unusable(
                folder, f"it holds {foreign[0]!r}, which is not a step; a run has a folder of its own"
            )
        if own and not is_checkpoint(folder):
            raise _unusable(folder, "its steps were not saved by this program")


def _is_harmless(name: str) -> bool:
    """Whether it is what a killed save left, or what a disk has by itself."""
    return ".orbax-checkpoint-tmp" in name or name == "lost+found"


def prove_writable(config: Config) -> None:
    """Writes and removes a file where checkpoints go, after making the folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    folder = checkpoint_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot save checkpoints in '{folder}': {why}; nothing was changed. Choose another checkpoint.dir"
    )
