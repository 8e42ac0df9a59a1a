# SPDX-License-Identifier: Apache-2.0
"""Writes a timeline in the Chrome trace-event format, one event a line, as it happens.

The file is a JSON array whose closing bracket may be missing: what a killed run leaves behind can still be opened.
Source: "Trace Event Format", the JSON Array Format.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

#: Events that wait for the writing thread at most, about 4 MiB; more are dropped and counted.
MAX_WAITING = 1 << 14
#: What is written at most before compression: Perfetto's page opens no more than that.
MAX_FILE_BYTES = 1 << 30
_INTERVAL_S = 0.25
#: Rows in the order in which they are shown; those of threads and others come last.
_ORDER = ("phase", "device", "copy", "read", "write")


class Event(NamedTuple):
    """Something that went on for a while. Without a category it is a counter at one moment."""

    category: str
    track: str
    name: str
    begin_ns: int
    end_ns: int
    facts: dict[str, int] | None
    overlapping: bool


class TraceWriter:
    """Appends events to ``path`` on a thread of its own.

    Threading: ``put`` may be called from any thread and never waits for the disk.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.dropped = 0
        self._path = path
        self._max_bytes = self._left_bytes = max_bytes
        self._waiting: deque[Event] = deque()
        self._rows = _Rows()
        self._origin_ns = time.perf_counter_ns()
        self._file: BufferedIOBase | None = _open(path)
        self._write(
            [_meta("process_name", 0, name="memascend-jax", unix_time_s=round(time.time(), 3))], b"[\n"
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Takes an event, or drops it when the writing thread is too far behind."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
        else:
            self._waiting.append(event)

    def close(self) -> None:
        """Writes what waits and ends the file; does nothing the second time."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._drain()
        if self.dropped:
            logger.warning(
                "%s lacks %d events, which came faster than they were written", self._path, self.dropped
            )
        if self._file is not None:
            self._write([_meta("dropped_events", 0, count=self.dropped)], end=b"\n]\n")
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._drain()

    def _drain(self) -> None:
        lines: list[str] = []
        while self._waiting:
            lines += self._lines(self._waiting.popleft())
            if len(lines) >= 1024:
                self._write(lines)
                lines = []
        if lines:
            self._write(lines)

    def _write(self, lines: list[str], begin: bytes = b",\n", end: bytes = b"") -> None:
        if self._file is None:
            return
        data = begin + ",\n".join(lines).encode() + end
        try:
            self._file.write(data)
            self._file.flush()
            self._left_bytes -= len(data)
            if self._left_bytes < 0 and not end:
                self._file.write(b"\n]\n")
                self._give_up(f"it has reached its limit of {self._max_bytes:,} bytes")
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _give_up(self, reason: str) -> None:
        logger.warning("the trace %s ends here: %s; the run goes on", self._path, reason)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                # Of what could not be written there is nothing to save.
                logger.debug("closing the trace failed", exc_info=True)

    def _lines(self, event: Event) -> list[str]:
        timestamp = (event.begin_ns - self._origin_ns) / 1000
        facts = event.facts or {}
        if not event.category:
            return [_json(ph="C", pid=1, tid=0, ts=timestamp, name=event.name, args=facts)]
        row, lines = self._rows.of(event)
        duration = (event.end_ns - event.begin_ns) / 1000
        fields = {"pid": 1, "tid": row, "ts": timestamp, "dur": duration, "cat": event.category}
        return [*lines, _json(ph="X", **fields, name=event.name, **({"args": facts} if facts else {}))]


class _Rows:
    """Gives each track a row, and a track of overlapping events as many as they need."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._busy_until: dict[str, list[int]] = {}

    def of(self, event: Event) -> tuple[int, list[str]]:
        """Returns the number of the event's row, and the lines that introduce it when it is new."""
        lane = self._free_lane(event) if event.overlapping else 0
        key = event.track, lane
        if key in self._numbers:
            return self._numbers[key], []
        number = self._numbers[key] = len(self._numbers) + 1
        rank = next((i for i, word in enumerate(_ORDER) if event.track.startswith(word)), len(_ORDER))
        return number, [
            _meta("thread_name", number, name=event.track),
            _meta("thread_sort_index", number, sort_index=rank * 1000 + lane),
        ]

    def _free_lane(self, event: Event) -> int:
        # Events come as they end, not as they begin: a lane is free when its last event ended before this one began.
        lanes = self._busy_until.setdefault(event.track, [])
        for lane, until in enumerate(lanes):
            if until <= event.begin_ns:
                lanes[lane] = event.end_ns
                return lane
        lanes.append(event.end_ns)
        return len(lanes) - 1


def _open(path: Path) -> BufferedIOBase:
    path.unlink(missing_ok=True)
    if path.suffix == ".gz":
        import gzip

        # Level 1: a third of the size of the text at a tenth of the time of the default.
        return gzip.GzipFile(path, "wb", compresslevel=1)
    return path.open("xb")


def _meta(kind: str, row: int, **facts: object) -> str:
    return _json(ph="M", pid=1, tid=row, name=kind, args=facts)


def _json(**fields: object) -> str:
    return json.dumps(fields, separators=(",", ":"))
