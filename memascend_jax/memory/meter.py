# SPDX-License-Identifier: Apache-2.0
"""What the process really uses: read from the kernel, never estimated."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from memascend_jax.memory.cgroup import memory_cgroups, read_number, usage_file
from memascend_jax.observe import trace
from memascend_jax.observe.meter_log import MeterLog
from memascend_jax.units import format_bytes

#: After this many samples the interval doubles: the series of a run of days stays a few megabytes.
_SAMPLES_PER_INTERVAL = 4096

#: What else is sampled: (name, value), always the same names; None where a value is not known.
Gauges = Callable[[], Mapping[str, int | None]]


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Host memory of this process at one moment, in bytes.

    Attributes:
        time_s: ``time.monotonic()``.
        rss_bytes: resident memory, of which anonymous, of files and shared are the next three.
        locked_bytes: pinned by mlock.
        peak_rss_bytes: the highest resident memory since the process began (VmHWM), exact between samples too.
        cgroup_usage_bytes: of the innermost memory cgroup; None outside one.
    """

    time_s: float
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    locked_bytes: int
    peak_rss_bytes: int
    cgroup_usage_bytes: int | None


def take_sample() -> MemorySample:
    """Returns the memory of this process now. The cgroup is the one that the process was in at the first call."""
    status = _status()
    usage = _usage_file()
    return MemorySample(
        time_s=time.monotonic(),
        rss_bytes=status["VmRSS"],
        anonymous_bytes=status["RssAnon"],
        file_bytes=status["RssFile"],
        shared_bytes=status["RssShmem"],
        locked_bytes=status["VmLck"],
        peak_rss_bytes=status["VmHWM"],
        cgroup_usage_bytes=read_number(usage) if usage else None,
    )


def resident_bytes() -> int:
    """Returns the resident memory of this process now, and nothing else: a few microseconds."""
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read(128).split()[1]) * mmap.PAGESIZE


def peak_rss_bytes() -> int:
    """Returns the highest resident memory of this process so far (VmHWM)."""
    return _status()["VmHWM"]


def memory_limit_bytes() -> int | None:
    """Returns the tightest memory limit among this process's cgroups; None without one."""
    limits = [group.limit_bytes for group in memory_cgroups() if group.limit_bytes is not None]
    return min(limits, default=None)


def available_memory_bytes() -> int:
    """Returns the bytes this process could still take: free in the machine and within its cgroups' limits."""
    return memory_room().available_bytes


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What a process can still take, and ``where`` that is the limit, in words."""

    available_bytes: int
    where: str


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    """Returns what this process can still take in the machine, or in the tightest of its cgroups.

    Args:
        root: where ``/proc`` and the cgroup mounts are looked for; another folder in tests.
    """
    machine = _kib_fields(root / "proc/meminfo")
    where = f"on this machine ({format_bytes(machine['MemTotal'])} in all)"
    tightest = MemoryRoom(machine["MemAvailable"], where)
    for group in memory_cgroups(root):
        left, limit = group.available_bytes, group.limit_bytes
        if left is not None and limit is not None and left < tightest.available_bytes:
            tightest = MemoryRoom(left, f"in its memory cgroup (limited to {format_bytes(limit)})")
    return tightest


@dataclass(frozen=True, slots=True)
class ProcessIo:
    """Bytes this process caused to be read from and written to block devices, as the kernel counts them."""

    read_bytes: int
    write_bytes: int


def process_io_bytes() -> ProcessIo:
    """Returns the kernel's count of this process's block I/O (``/proc/self/io``)."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ", 1) for line in lines)
    return ProcessIo(int(fields["read_bytes"]), int(fields["write_bytes"]))


class Meter:
    """Samples the process's memory on a thread while its ``with`` block runs.

    Args:
        log: where the samples go; None: nowhere, ``snapshot`` works all the same.
        interval_s: time between samples, doubled after each few thousand. The peak does not depend on it.
    """

    def __init__(self, log: MeterLog | None = None, interval_s: float = 0.25) -> None:
        self._log = log
        self._interval_s = interval_s
        self._gauges: Gauges = dict
        self._sampling = threading.Lock()
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)

    def snapshot(self) -> MemorySample:
        """Returns the memory of this process now, freshly read."""
        return take_sample()

    def use_gauges(self, gauges: Gauges) -> None:
        """Samples ``gauges`` too from now on, on the meter's thread; ``dict`` ends that.

        The former ones are sampled a last time, so that the log ends with their totals, and not called after this.
        """
        with self._sampling:
            if self._gauges is not dict and self._thread.is_alive():
                self._sample()
            self._gauges = gauges

    def __enter__(self) -> Meter:
        if self._log is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._log is not None:
            self._thread.join()
            self._log.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._sampling:
                self._sample()
            self._samples += 1
            if self._samples % _SAMPLES_PER_INTERVAL == 0:
                self._interval_s *= 2

    def _sample(self) -> None:
        """Writes one sample. The caller holds the lock: the log's lines are in the order of their times."""
        assert self._log is not None, "the thread runs with a log only"
        sample = take_sample()
        gauges = self._gauges()
        values: dict[str, int | None] = {
            "rss": sample.rss_bytes,
            "peak": sample.peak_rss_bytes,
            "anonymous": sample.anonymous_bytes,
            "file": sample.file_bytes,
            "shared": sample.shared_bytes,
            "locked": sample.locked_bytes,
            "cgroup": sample.cgroup_usage_bytes,
            **gauges,
        }
        self._log.write(sample.time_s, values)
        if trace.current is not None:
            trace.current.count(
                "memory",
                {name: sample_bytes for name, sample_bytes in values.items() if sample_bytes is not None},
            )


_usage_file = cache(usage_file)


def _status() -> dict[str, int]:
    return _kib_fields(Path("/proc/self/status"))


def _kib_fields(path: Path) -> dict[str, int]:
    """Returns the fields of a /proc file that are written as ``Name:  123 kB``, in bytes."""
    fields = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value[:-3]) * 1024
    return fields
