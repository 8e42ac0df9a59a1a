# SPDX-License-Identifier: Apache-2.0
"""Stopping at a committed step when the user or the scheduler asks for it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request that the loop looks at between steps.

    A second SIGINT raises ``KeyboardInterrupt`` at once; the store then holds the last committed step. Use as a
    context manager in the main thread; the former handlers come back at its end.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
