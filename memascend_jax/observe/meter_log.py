# SPDX-License-Identifier: Apache-2.0
"""``meter.jsonl``: what the process used over time, written while it runs and read back for figures.

A header line names the columns and what does not change; the lines after it are arrays of values, seconds first::

    {"schema": 1, "unix_time_s": …, "columns": ["seconds", "rss", …], "facts": {…}}
    [0.25, 734003200, …]

A new header follows when the columns change or a run goes on. Bytes and counts are whole numbers, unknown ones null.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = 1
#: Lines are written together after this time: a write each would wake the disk four times a second.
_WRITE_EVERY_S = 2.0


class MeterLog:
    """Appends to the meter's file. A file that cannot be written ends the log, not the run.

    Args:
        facts: what the header says besides, such as the budget; fit for JSON.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._facts = dict(facts)
        self._columns: list[str] = []
        self._started_s = time.monotonic()
        self._lines: list[str] = []
        self._written_s = 0.0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        length = os.fstat(self._fd).st_size
        if length and os.pread(self._fd, 1, length - 1) != b"\n":
            # A killed run ended within a line; the header must not become a part of it.
            self._lines.append("")

    def write(self, time_s: float, values: Mapping[str, int | None]) -> None:
        """Appends ``values`` at ``time_s`` of ``time.monotonic``; a header first when their names are new."""
        if list(values) != self._columns:
            self._columns = list(values)
            now = time.time() - (time.monotonic() - self._started_s)
            header = {"schema": SCHEMA, "unix_time_s": round(now, 3), "columns": ["seconds", *values]}
            self._lines.append(json.dumps({**header, "facts": self._facts}))
        seconds = round(time_s - self._started_s, 3)
        self._lines.append(json.dumps([seconds, *values.values()], separators=(",", ":")))
        if time_s - self._written_s >= _WRITE_EVERY_S:
            self._flush()
            self._written_s = time_s

    def close(self) -> None:
        """Writes what is left and closes the file; does nothing the second time."""
        if self._fd >= 0:
            self._flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        data = "".join(line + "\n" for line in self._lines).encode()
        self._lines = []
        try:
            while data and self._fd >= 0:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            logger.warning("%s ends here: %s; the run goes on", self._path, error.strerror)
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class MeterSeries:
    """What one session of a run used over time.

    Attributes:
        unix_time_s: when second 0 was.
        facts: what the header says besides.
        seconds: time of each sample.
        columns: values by name, each as long as ``seconds``.
    """

    unix_time_s: float
    facts: Mapping[str, Any]
    seconds: list[float] = field(default_factory=list)
    columns: dict[str, list[int | None]] = field(default_factory=dict)


def read_meter(path: Path) -> list[MeterSeries]:
    """Returns the series of ``path``, one per header; what a killed run left half written is left out."""
    found: list[MeterSeries] = []
    for line in _json_lines(path):
        if isinstance(line, dict):
            names = line["columns"][1:]
            found.append(
                MeterSeries(line["unix_time_s"], line["facts"], columns={name: [] for name in names})
            )
        elif found and len(line) == 1 + len(found[-1].columns):
            found[-1].seconds.append(line[0])
            for values, value in zip(found[-1].columns.values(), line[1:], strict=True):
                values.append(value)
    return [series for series in found if series.seconds]


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                # The line during which a run was killed; the next session begins with a header of its own.
                continue
