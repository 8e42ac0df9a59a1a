# SPDX-License-Identifier: Apache-2.0
"""Stopping at a committed step when the user or the scheduler asks for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request that the loop looks at between steps.

    A second SIGINT goes to the former handler: Python's own raises ``KeyboardInterrupt`` at once, and so does this
    class where there is none. The store then holds the last committed step. Use as a context manager in the main
    thread; the former handlers come back at its end.

    Args:
        on_request: told the name of the first signal, within its handler.
    """

    def __init__(self, on_request: Callable[[str], None] | None = None) -> None:
        self.signal_name: str | None = None
        self._on_request = on_request
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
        if not self.requested:
            self.signal_name = signal.Signals(number).name
            if self._on_request is not None:
                self._on_request(self.signal_name)
        elif number == signal.SIGINT:
            former = self._former[number]
            if callable(former):
                former(number, frame)
            raise KeyboardInterrupt
