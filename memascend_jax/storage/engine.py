# SPDX-License-Identifier: Apache-2.0
"""What the store asks of an I/O engine, the native engine behind it, and memory that direct I/O may use."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class EngineTicket(Protocol):
    """I/O in flight. ``wait`` raises ``OSError`` with errno when any part of it failed."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...
    def spans(self) -> Sequence[tuple[int, str, int, int, int, int]]: ...


class Engine(Protocol):
    """Moves segments, int64 ``[n, 4]`` of (member, offset, address, nbytes), between members and memory."""

    @property
    def backend(self) -> str: ...
    @property
    def backend_reason(self) -> str: ...
    def submit_read(
        self, segments: Int64Array, keepalive: object = None, urgent: bool = False
    ) -> EngineTicket: ...
    def submit_write(self, segments: Int64Array, keepalive: object = None) -> EngineTicket: ...
    def flush(self) -> None: ...
    def counters(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


EngineFactory = Callable[[Sequence[int]], Engine]


def native_engine(
    fds: Sequence[int],
    *,
    backend: str = "auto",
    queue_depth: int = 8,
    request_bytes: int = 4 << 20,
    regions: Sequence[tuple[int, int]] = (),
) -> Engine:
    """Returns the engine of the native core over ``fds``; the caller keeps and closes the descriptors."""
    from memascend_jax._native import _core

    engine: Engine = _core.IoEngine(
        list(fds),
        backend=backend,
        queue_depth=queue_depth,
        request_bytes=request_bytes,
        regions=list(regions),
    )
    return engine


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns ``nbytes`` of zeroed page-aligned memory, given back to the system with the array."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


class ReusedBuffers:
    """Aligned memory for one thing after the other, given out again once nobody holds an array on it any more.

    Fresh memory costs a fault and zeroing per page, about as much as copying what is read into it. Who holds an array
    is what CPython's reference counts say, so nobody has to give it back.

    Args:
        most: buffers that are kept for reuse.

    Threading: used by one thread at a time; arrays may be dropped on any.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._owners: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns ``nbytes`` of page-aligned memory with whatever is in it."""
        for owner in self._owners:
            # Every view of it counts, and views of views.
            if owner.nbytes >= nbytes and sys.getrefcount(owner) == _UNUSED:
                return owner[:nbytes]
        owner = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
        if len(self._owners) == self._most:
            self._owners.pop(0)
        self._owners.append(owner)
        return owner[:nbytes]


def _count_of_unused() -> int:
    """What the interpreter counts of an array that only a list and the loop over it hold."""
    owners, counts = [np.empty(0, np.uint8)], []
    for owner in owners:
        counts.append(sys.getrefcount(owner))
    return counts[0]


_UNUSED = _count_of_unused()


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns where the array's first element lies."""
    return int(array.__array_interface__["data"][0])
