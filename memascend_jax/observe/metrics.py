# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl``: one line per step, durable before the step is committed, cut back when a run is resumed.

The update of a step runs beside the next step, whose line has what was waited for it. The bytes of a line are those
moved from the beginning of the update before its step to the beginning of its own, which is at the end of the backward,
or with updates in the backward at its beginning: so each line but the first has one whole update. Where a run ends or
stops, a line with ``"drain": true`` has what came after its last step's.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Longer than any line.
_LOOK_BACK_BYTES = 1 << 16
logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends lines to ``path``, from which everything after byte ``offset`` is removed first.

    The offset of the last committed step is part of the store's state: lines of steps that were not committed
    vanish on resume and are written again.

    Raises:
        OSError: the file cannot be created, cut or written, with errno and filename.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            present = os.fstat(self._fd).st_size
            if present < offset:
                # Only figures are lost; the training state is whole, so the run goes on.
                logger.warning(
                    "%s has %d bytes, expected %d: earlier lines are missing", path, present, offset
                )
            self._length = _whole_lines(self._fd, min(offset, present))
            if self._length < min(offset, present):
                logger.warning(
                    "%s has no whole line up to byte %d; it goes on after byte %d", path, offset, self._length
                )
            os.ftruncate(self._fd, self._length)
            os.fsync(self._fd)
            _sync_folder(path.parent)
        except OSError as error:
            os.close(self._fd)
            raise OSError(
                error.errno, f"cannot prepare the metrics file: {error.strerror}", str(path)
            ) from error

    def write(self, line: Mapping[str, Any]) -> int:
        """Appends ``line`` and returns the length of the file, in bytes, once it is on disk.

        A number that JSON does not have (inf, nan) is written as null.
        """
        data = (json.dumps(_finite(line), allow_nan=False, separators=(", ", ": ")) + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._length + written)
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write the metrics file: {error.strerror}", str(self.path)
            ) from error
        self._length += len(data)
        return self._length

    def close(self) -> None:
        """Closes the file; does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_lines(path: Path, *, drain: bool = False) -> list[dict[str, Any]]:
    """Returns the lines of the steps (``drain``: of the last update instead).

    A last line that is still being written is left out.
    """
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if line.get("drain", False) == drain:
            lines.append(line)
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(fd: int, length: int) -> int:
    """The end of the last whole line in the first ``length`` bytes: less than that only in a file that was damaged."""
    while length:
        begin = max(0, length - _LOOK_BACK_BYTES)
        newline = os.pread(fd, length - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        length = begin
    return 0


def _sync_folder(folder: Path) -> None:
    # A new file survives a crash only when its folder's entry is on disk too.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
