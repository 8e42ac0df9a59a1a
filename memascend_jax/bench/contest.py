# SPDX-License-Identifier: Apache-2.0
"""Contenders that do the same work in turns, so that a disk that drifts is as unfair to one as to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from memascend_jax.bench import file_contenders, fio
from memascend_jax.bench.file_contenders import FileContender
from memascend_jax.bench.fio import FioSetting
from memascend_jax.bench.sample import Sample, Series, timed
from memascend_jax.bench.store_contender import ROW_BYTES, StoreContender
from memascend_jax.bench.tensor_set import TensorSet
from memascend_jax.errors import MemascendError
from memascend_jax.units import MIB, round_up

Kind = Literal["write", "durable write", "read", "mixed", "rows"]
ROWS = 4096
#: fio's clock ticks in milliseconds: of a real measurement, a job moves at least this much.
_FIO_BYTES = 512 * MIB
_FIO_ROW_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work on one set of tensors. ``write``: done when the disk took it; ``durable write``: flushed too."""

    kind: Kind
    tensors: TensorSet

    @property
    def nbytes(self) -> int:
        """What one measurement moves."""
        if self.kind == "rows":
            return ROWS * ROW_BYTES
        return self.tensors.nbytes * (2 if self.kind == "mixed" else 1)

    def __str__(self) -> str:
        if self.kind == "rows":
            return f"{ROWS:,} random rows of {ROW_BYTES:,} bytes, {self.tensors.label}"
        return f"{self.kind}, {self.tensors.label}"


class Contender(Protocol):
    """Somebody who can do some of the cases."""

    name: str

    def takes(self, case: Case) -> bool: ...
    def note(self, case: Case) -> str: ...
    def measure(self, case: Case) -> Sample: ...


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


class TheDisk:
    """fio at its best setting: the roof."""

    name = "fio io_uring"
    _KINDS: dict[Kind, str] = {"write": "write", "read": "read", "mixed": "rw", "rows": "randread"}  # noqa: RUF012

    def __init__(self, path: str, file_bytes: int) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._best: dict[Kind, FioSetting] = {}
        toy = file_bytes < 128 * MIB
        self._least_bytes = file_bytes if toy else _FIO_BYTES
        self._least_row_bytes = file_bytes if toy else _FIO_ROW_BYTES

    def tune(self, say: Callable[[str], None], rounds: int = 2) -> None:
        """Tries the settings of every kind and keeps the fastest of each."""
        for kind, fio_kind in self._KINDS.items():
            speeds: dict[FioSetting, float] = {}
            for _ in range(rounds):
                for setting in fio.settings(fio_kind):
                    seconds = self._run(fio_kind, setting, self._least(kind)).seconds
                    speeds[setting] = max(speeds.get(setting, 0), 1 / seconds)
            self._best[kind] = max(speeds, key=lambda setting: speeds[setting])
            say(f"fio {kind}: best of {len(speeds)} settings is {self._best[kind]}")

    def takes(self, case: Case) -> bool:
        return case.kind in self._best

    def note(self, case: Case) -> str:
        return str(self._best[case.kind])

    def measure(self, case: Case) -> Sample:
        moved = max(case.nbytes, self._least(case.kind))
        sample = self._run(self._KINDS[case.kind], self._best[case.kind], moved)
        scale = case.nbytes / moved
        return Sample(sample.seconds * scale, sample.cpu_s * scale)

    def _least(self, kind: Kind) -> int:
        return self._least_row_bytes if kind == "rows" else self._least_bytes

    def _run(self, kind: str, setting: FioSetting, nbytes: int) -> Sample:
        nbytes = round_up(nbytes, setting.block_bytes)
        return fio.run(self._path, kind, nbytes, setting, self._file_bytes)


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


def compete(
    contenders: Sequence[Contender], cases: Sequence[Case], rounds: int, say: Callable[[str], None]
) -> list[Series]:
    """Returns the series of every contender in every case it takes: in each round all of them, one after the other.

    A contender that fails is left out of the case from then on; its error is kept.
    """
    found: list[Series] = []
    for case in cases:
        say(str(case))
        series = [
            (contender, Series(contender.name, str(case), case.nbytes, note=contender.note(case)))
            for contender in contenders
            if contender.takes(case)
        ]
        for turn in range(rounds + 1):
            for contender, one in series[turn % len(series) :] + series[: turn % len(series)]:
                if one.error:
                    continue
                try:
                    sample = contender.measure(case)
                except (OSError, MemascendError, ValueError, RuntimeError) as error:
                    one.error = f"{type(error).__name__}: {error}"
                    continue
                # The first round warms up.
                if turn > 0:
                    one.samples.append(sample)
        found += [one for _, one in series]
    return found


def _cut(source: np.ndarray, tensors: TensorSet) -> dict[str, np.ndarray]:
    arrays = {}
    at = 0
    for name, nbytes in tensors.sizes.items():
        arrays[name] = source[at : at + nbytes]
        at += nbytes
    return arrays
