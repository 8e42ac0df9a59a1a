# SPDX-License-Identifier: Apache-2.0
"""What the process really uses: read from the kernel, never estimated."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from memascend_jax.memory.cgroup import memory_cgroups

#: When the series reaches this length, every second sample is dropped and the interval doubled.
_LONGEST_SERIES = 4096


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Host memory of this process at one moment, in bytes.

    Attributes:
        time_s: ``time.monotonic()``.
        rss_bytes: resident memory, of which anonymous, of files and shared are the next three.
        locked_bytes: pinned by mlock.
        peak_rss_bytes: the highest resident memory since the process began (VmHWM), exact between samples too.
        cgroup_usage_bytes: of the innermost memory cgroup; None outside one.
        cgroup_limit_bytes: the tightest limit among the process's cgroups; None without one.
    """

    time_s: float
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    locked_bytes: int
    peak_rss_bytes: int
    cgroup_usage_bytes: int | None
    cgroup_limit_bytes: int | None


def take_sample() -> MemorySample:
    """Returns the memory of this process now."""
    status = _status()
    groups = memory_cgroups()
    limits = [group.limit_bytes for group in groups if group.limit_bytes is not None]
    return MemorySample(
        time_s=time.monotonic(),
        rss_bytes=status["VmRSS"],
        anonymous_bytes=status["RssAnon"],
        file_bytes=status["RssFile"],
        shared_bytes=status["RssShmem"],
        locked_bytes=status["VmLck"],
        peak_rss_bytes=status["VmHWM"],
        cgroup_usage_bytes=groups[0].usage_bytes if groups else None,
        cgroup_limit_bytes=min(limits, default=None),
    )


def peak_rss_bytes() -> int:
    """Returns the highest resident memory of this process so far (VmHWM)."""
    return _status()["VmHWM"]


def available_memory_bytes() -> int:
    """Returns the bytes this process could still take: free in the machine and within its cgroups' limits."""
    machine = _kib_fields(Path("/proc/meminfo"))["MemAvailable"]
    groups = (group.available_bytes for group in memory_cgroups())
    return min([machine, *(room for room in groups if room is not None)])


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
        interval_s: time between samples. The peak does not depend on it, the series does.
    """

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)

    def snapshot(self) -> MemorySample:
        """Returns the memory of this process now, freshly read."""
        return take_sample()

    def series(self) -> list[MemorySample]:
        """Returns the samples so far, at most a few thousand, evenly spaced however long the run."""
        with self._lock:
            return list(self._samples)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            sample = take_sample()
            with self._lock:
                self._samples.append(sample)
                if len(self._samples) >= _LONGEST_SERIES:
                    del self._samples[1::2]
                    self._interval_s *= 2


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
