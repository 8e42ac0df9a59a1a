# SPDX-License-Identifier: Apache-2.0
"""What a caller holds while a batch is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend_jax.observe.trace import READ, WRITE
from memascend_jax.storage.batch import Requests
from memascend_jax.storage.engine import EngineTicket
from memascend_jax.storage.io_trace import describe
from memascend_jax.storage.read_checks import Check, mismatch

if TYPE_CHECKING:
    from memascend_jax.storage.tile_io import TileIo


class Ticket:
    """A submitted batch. Keep the memory it reads or writes alive and still until ``wait`` returns."""

    __slots__ = ("_error", "_io", "checks", "engine_tickets", "nbytes", "requests", "serial", "settled")

    def __init__(self, io: TileIo, serial: int, requests: Requests) -> None:
        self._io = io
        self._error: Exception | None = None
        self.serial = serial
        self.requests = requests
        self.engine_tickets: list[EngineTicket] = []
        self.checks: list[Check] = []
        self.nbytes = 0
        self.settled = False

    def done(self) -> bool:
        """Returns whether ``wait`` would return at once."""
        return self.settled or all(ticket.done() for ticket in self.engine_tickets)

    def wait(self) -> None:
        """Waits until all of the batch is done.

        Raises:
            OSError: the disk failed; the message names tensor, path and offset.
            StoreError: with ``check_reads``, data that does not match its checksum.
        """
        self._io.settle(self)
        if self._error is None and self.checks:
            # Here, not in ``settle``: only the caller knows that the memory is still there.
            checks, self.checks = self.checks, []
            self._error = mismatch(checks, self._io.volume.path, self._io.found_dirty)
        if self._error is not None:
            raise self._error

    def __str__(self) -> str:
        if self.settled:
            return "batch that is done"
        writes = self.requests.writes or self.requests.scratch_writes
        return (
            f"write of {describe(self.requests, WRITE)}"
            if writes
            else f"read of {describe(self.requests, READ)}"
        )

    def fail(self, error: Exception) -> None:
        """Sets what ``wait`` raises."""
        self._error = error
