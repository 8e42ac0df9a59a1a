# SPDX-License-Identifier: Apache-2.0
"""Who takes part: the store, the store without checksums, fio, and the ways of keeping tensors in files."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memascend_jax.bench import file_contenders, fio
from memascend_jax.bench.contest import Case, Kind
from memascend_jax.bench.file_contenders import FileContender
from memascend_jax.bench.fio import FioRegion, FioSetting
from memascend_jax.bench.sample import Sample, timed
from memascend_jax.bench.store_contender import StoreContender
from memascend_jax.bench.tensor_set import TensorSet
from memascend_jax.units import MIB, round_up

#: fio's clock ticks in milliseconds: of a real measurement, a job moves at least this much.
_FIO_BYTES = 256 * MIB
_FIO_ROW_BYTES = 128 * MIB


class TheStore:
    """The store as a contender in all cases."""

    name = StoreContender.name

    def __init__(self, store: StoreContender) -> None:
        self._store = store

    def takes(self, case: Case) -> bool:
        return True

    def note(self, case: Case) -> str:
        return ""

    def measure(self, case: Case) -> Sample:
        label = case.tensors.label
        work: dict[Kind, Callable[[], None]] = {
            "write": lambda: self._store.write(label),
            "durable write": lambda: self._store.write_durably(label),
            "read": lambda: self._store.read(label),
            "mixed": lambda: self._store.mixed(label),
            "rows": self._store.read_rows,
        }
        sample = timed(work[case.kind])
        if case.kind == "read":
            self._store.check(label)
        elif case.kind in ("write", "mixed"):
            self._store.store.commit()
        return sample


class TheStoreUnchecked:
    """The same writes to a scratch extent, which has no checksums: the difference is what they cost."""

    name = "memascend store, no checksums"

    def __init__(self, store: StoreContender) -> None:
        self._store = store

    def takes(self, case: Case) -> bool:
        return case.kind == "write"

    def note(self, case: Case) -> str:
        return ""

    def measure(self, case: Case) -> Sample:
        sample = timed(lambda: self._store.write_scratch(case.tensors.label))
        self._store.store.commit()
        return sample


class TheDisk:
    """fio at its best setting, on an extent of the store's own members: the roof."""

    name = "fio io_uring"
    _KINDS: dict[Kind, str] = {"write": "write", "read": "read", "mixed": "rw", "rows": "randread"}  # noqa: RUF012

    def __init__(self, region: FioRegion, kinds: Sequence[Kind]) -> None:
        self._region = region
        self._kinds = [kind for kind in kinds if kind in self._KINDS]
        self._best: dict[Kind, FioSetting] = {}
        toy = region.nbytes < 128 * MIB
        self._least_bytes = region.nbytes if toy else _FIO_BYTES
        self._least_row_bytes = region.nbytes if toy else _FIO_ROW_BYTES

    def tune(self, say: Callable[[str], None], rounds: int = 3) -> None:
        """Tries the settings of every kind in turns and keeps the one with the fastest median of each."""
        for kind in self._kinds:
            region = self._region
            tried: dict[FioSetting, list[float]] = {
                setting: [] for setting in fio.settings(self._KINDS[kind], region.nbytes)
            }
            for _ in range(rounds):
                for setting, seconds in tried.items():
                    seconds.append(self._run(kind, setting, region, self._least(kind)).seconds)
            medians = {setting: statistics.median(seconds) for setting, seconds in tried.items()}
            best = self._best[kind] = min(medians, key=lambda setting: medians[setting])
            say(f"fio {kind}: of {len(tried)} settings the fastest is {best}")

    def takes(self, case: Case) -> bool:
        return case.kind in self._best

    def note(self, case: Case) -> str:
        return str(self._best[case.kind])

    def measure(self, case: Case) -> Sample:
        setting = self._best[case.kind]
        moved = max(case.nbytes, self._least(case.kind))
        region = self._region if case.kind == "rows" else self._region.first(case.tensors.nbytes, setting)
        sample = self._run(case.kind, setting, region, moved)
        scale = case.nbytes / moved
        return Sample(sample.seconds * scale, sample.cpu_s * scale)

    def _least(self, kind: Kind) -> int:
        return self._least_row_bytes if kind == "rows" else self._least_bytes

    def _run(self, kind: Kind, setting: FioSetting, region: FioRegion, nbytes: int) -> Sample:
        nbytes = round_up(nbytes, setting.block_bytes)
        sample = fio.run(region, self._KINDS[kind], nbytes, setting)
        if kind in ("write", "mixed"):
            for path in self._region.paths:
                sync(path)
        return sample


class Files:
    """A way of keeping tensors in files, each set in a folder of its own."""

    def __init__(self, kind: str, folder: Path, sets: Sequence[TensorSet]) -> None:
        source = np.frombuffer(np.random.default_rng(3).bytes(max(s.nbytes for s in sets)), np.uint8)
        self._folder = folder
        self._arrays = {tensors.label: _cut(source, tensors) for tensors in sets}
        self._files: dict[str, FileContender] = {
            tensors.label: file_contenders.build(kind, folder / f"{index}")
            for index, tensors in enumerate(sets)
        }
        self._written: set[str] = set()
        self.name = next(iter(self._files.values())).name

    def takes(self, case: Case) -> bool:
        return case.kind in ("durable write", "read")

    def note(self, case: Case) -> str:
        return ""

    def measure(self, case: Case) -> Sample:
        files, arrays = self._files[case.tensors.label], self._arrays[case.tensors.label]
        if case.kind == "durable write":
            return timed(lambda: files.write(arrays))
        if case.tensors.label not in self._written:
            files.write(arrays)
            self._written.add(case.tensors.label)
        file_contenders.drop_from_cache(self._folder)
        return timed(lambda: files.read(arrays))


def sync(path: Path | str) -> None:
    """Makes what was written to ``path`` durable."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _cut(source: npt.NDArray[np.uint8], tensors: TensorSet) -> dict[str, npt.NDArray[np.uint8]]:
    arrays = {}
    at = 0
    for name, nbytes in tensors.sizes.items():
        arrays[name] = source[at : at + nbytes]
        at += nbytes
    return arrays
