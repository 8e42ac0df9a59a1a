# SPDX-License-Identifier: Apache-2.0
"""Stopping at a committed step when the user or the scheduler asks for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from memascend_jax.errors import StoppedError

#: Ctrl-C, and what schedulers and systems send before they end a process: systemd, Kubernetes and Slurm (TERM), Slurm's
#: ``--signal``, Grid Engine and LSF (USR1, USR2), a limit of processor time (XCPU), a lost terminal (HUP).
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
)


class StopRequest:
    """Turns the first of ``STOP_SIGNALS`` into a request that the loop looks at between steps.

    A second SIGINT goes to the former handler: Python's own raises ``KeyboardInterrupt`` at once, and so does this
    class where there is none. The store then holds the last committed step. Of the others, which schedulers repeat,
    only the first counts. A signal that the process was started to ignore, as ``nohup`` does, stays ignored.
    Use as a context manager in the main thread; the former handlers come back at its end.

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
        for number in STOP_SIGNALS:
            former = signal.signal(number, self._on_signal)
            if former == signal.SIG_IGN:
                signal.signal(number, former)
            else:
                self._former[number] = former
        return self

    def check(self, doing: str) -> None:
        """Returns when nobody has asked for a stop.

        Args:
            doing: what would be broken off, after "stopped by SIGTERM ".

        Raises:
            StoppedError: somebody has.
        """
        if self.requested:
            raise StoppedError(f"stopped by {self.signal_name} {doing}")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: not Python's own, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

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
