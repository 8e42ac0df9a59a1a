# SPDX-License-Identifier: Apache-2.0
"""Reads a run's timeline back, also one that a killed run left unfinished."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from memascend_jax.errors import DataError

NAMES = ("trace.json", "trace.json.gz")


def find_trace(folder: Path) -> Path | None:
    """Returns the newest timeline in a run's folder, or None."""
    present = [folder / name for name in NAMES if (folder / name).is_file()]
    return max(present, key=lambda path: path.stat().st_mtime, default=None)


def read_events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the events of ``path`` in the order of the file, up to where it was cut off.

    Raises:
        DataError: a line that is not the last one is not an event.
        OSError: the file cannot be read.
    """
    bad: tuple[int, str] | None = None
    for number, line in enumerate(_lines(path), start=1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        if bad is not None:
            raise DataError(f"cannot read the trace '{path}': line {bad[0]} is not an event: {bad[1][:80]}")
        try:
            yield json.loads(text)
        except ValueError:
            # Only the last line may be half written.
            bad = number, text


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        while True:
            try:
                line = file.readline()
            except (EOFError, zlib.error):
                return  # the compressed file was cut off
            if not line:
                return
            yield line.decode(errors="replace")


def _opened(path: Path) -> BufferedIOBase:
    return gzip.GzipFile(path, "rb") if path.suffix == ".gz" else path.open("rb")
