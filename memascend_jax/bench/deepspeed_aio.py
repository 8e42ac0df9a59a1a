# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's I/O handle (libaio) with its own pinned memory, a file per tensor, as its swapper uses it.

Takes part where the user has it: nothing here is needed to use the store. Its extension is compiled when it is first
loaded, which takes minutes and libaio's headers; load it once before measuring.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from memascend_jax.bench.contenders import sync
from memascend_jax.bench.contest import Case
from memascend_jax.bench.sample import Sample, timed
from memascend_jax.bench.tensor_set import TensorSet
from memascend_jax.errors import MachineError
from memascend_jax.units import KIB, MIB, round_up

#: Each of its threads takes a part of a tensor, in multiples of this.
_ALIGNMENT = 4096


class AioSetting(NamedTuple):
    """The arguments of its handle that matter; threads: ``intra_op_parallelism``."""

    block_bytes: int
    depth: int
    threads: int

    def __str__(self) -> str:
        size = (
            f"{self.block_bytes // MIB} MiB" if self.block_bytes >= MIB else f"{self.block_bytes // KIB} KiB"
        )
        return f"{size} x {self.depth}, {self.threads} threads"


#: Those that were ever the fastest in its own sweep on the disks we have seen.
SETTINGS = (
    AioSetting(MIB, 8, 1),
    AioSetting(MIB, 32, 1),
    AioSetting(MIB, 32, 2),
    AioSetting(8 * MIB, 16, 2),
)


def installed() -> bool:
    """Returns whether DeepSpeed and PyTorch are there."""
    return find_spec("deepspeed") is not None and find_spec("torch") is not None


class DeepSpeedAio:
    """Reads and writes the sets of tensors with ``async_pread`` and ``async_pwrite`` of one handle.

    Raises:
        MachineError: its extension cannot be loaded.
    """

    name = "DeepSpeed aio, pinned"

    def __init__(self, folder: Path, sets: Sequence[TensorSet]) -> None:
        self._aio, uint8 = _load()
        self._setting = SETTINGS[0]
        self._handle = self._build(self._setting)
        # Stays: what it has lent is known to the library as pinned, whichever handle moves it.
        self._lender = self._handle
        rooms = {tensors.label: _rooms(tensors) for tensors in sets}
        self._memory = self._lender.new_cpu_locked_tensor(max(sum(r) for r in rooms.values()), uint8)
        self._memory.random_(0, 256)
        self._files: dict[str, list[tuple[Any, str]]] = {}
        for index, (label, sizes) in enumerate(rooms.items()):
            (folder / f"{index}").mkdir(parents=True)
            views = self._memory.narrow(0, 0, sum(sizes)).split(sizes)
            self._files[label] = [(view, str(folder / f"{index}" / f"{i}")) for i, view in enumerate(views)]
            self._write(label)

    def tune(self, label: str, say: Callable[[str], None], rounds: int = 3) -> None:
        """Tries its settings in turns and keeps the fastest at reading and writing."""
        tried: dict[AioSetting, list[float]] = {setting: [] for setting in SETTINGS}
        for _ in range(rounds):
            for setting, seconds in tried.items():
                self._use(setting)
                seconds.append(timed(lambda: self._write(label)).seconds)
                self._settle(label)
                seconds[-1] += timed(lambda: self._read(label)).seconds
        self._use(min(tried, key=lambda setting: statistics.median(tried[setting])))
        say(f"{self.name}: of {len(tried)} settings the fastest is {self._setting}")

    def takes(self, case: Case) -> bool:
        return case.kind in ("write", "read", "durable write")

    def note(self, case: Case) -> str:
        return str(self._setting)

    def measure(self, case: Case) -> Sample:
        label = case.tensors.label
        if case.kind == "read":
            return timed(lambda: self._read(label))
        if case.kind == "durable write":
            return timed(lambda: self._write_durably(label))
        sample = timed(lambda: self._write(label))
        self._settle(label)
        return sample

    def close(self) -> None:
        """Gives its memory back."""
        self._files.clear()
        self._lender.free_cpu_locked_tensor(self._memory)

    def _read(self, label: str) -> None:
        for tensor, path in self._files[label]:
            self._started(self._handle.async_pread(tensor, path, 0), path)
        self._ended(label)

    def _write(self, label: str) -> None:
        for tensor, path in self._files[label]:
            self._started(self._handle.async_pwrite(tensor, path, 0), path)
        self._ended(label)

    def _write_durably(self, label: str) -> None:
        self._write(label)
        self._settle(label)

    @staticmethod
    def _started(code: int, path: str) -> None:
        if code != 0:
            raise MachineError(f"DeepSpeed's aio refused '{path}' with {code}")

    def _ended(self, label: str) -> None:
        done = self._handle.wait()
        if done != len(self._files[label]):
            raise MachineError(f"DeepSpeed's aio ended {done} of {len(self._files[label])} transfers")

    def _settle(self, label: str) -> None:
        for _, path in self._files[label]:
            sync(path)

    def _use(self, setting: AioSetting) -> None:
        if setting != self._setting:
            self._setting, self._handle = setting, self._build(setting)

    def _build(self, setting: AioSetting) -> Any:
        """Returns a handle that submits many requests at a time and overlaps them: its fast way."""
        return self._aio.aio_handle(setting.block_bytes, setting.depth, False, True, setting.threads)


def _load() -> tuple[Any, Any]:
    """Returns its compiled module, and an empty tensor of bytes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        # It reports its loading on the standard output, where the outcome of the command belongs.
        with redirect_stdout(sys.stderr):
            torch = import_module("torch")
            builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
            return builder.load(verbose=False), torch.empty(0, dtype=torch.uint8)
    except (ImportError, RuntimeError, OSError) as error:
        raise MachineError(f"cannot load DeepSpeed's aio: {error}") from error


def _rooms(tensors: TensorSet) -> list[int]:
    """Returns the bytes of each tensor, padded as its swapper does: to whole blocks for each of the threads."""
    unit = _ALIGNMENT * max(setting.threads for setting in SETTINGS)
    return [round_up(nbytes, unit) for nbytes in tensors.sizes.values()]
