# SPDX-License-Identifier: Apache-2.0
"""How a store does its I/O, and what it counted. None of it is in the format."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypedDict

from memascend_jax.errors import StoreError
from memascend_jax.storage.bounce import DEFAULT_BOUNCE_BYTES, Arena
from memascend_jax.storage.device import DirectIo
from memascend_jax.storage.engine import EngineFactory, native_engine
from memascend_jax.storage.whole_number import whole_number

IoBackend = Literal["auto", "io_uring", "threads"]
_MIN_BOUNCE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class IoCounters:
    """What this session has moved, metadata included: bytes and requests as given to the kernel."""

    read_bytes: int
    write_bytes: int
    read_requests: int
    write_requests: int


class IoArguments(TypedDict, total=False):
    """The keyword arguments that ``TensorStore.create`` and ``open`` share; see ``IoOptions``."""

    io_backend: IoBackend
    direct_io: DirectIo
    arena: Arena | None
    queue_depth: int
    request_bytes: int
    bounce_bytes: int
    check_reads: bool
    make_engine: EngineFactory | None


@dataclass(frozen=True, slots=True)
class IoOptions:
    """How a store does its I/O.

    Args:
        io_backend: ``auto`` takes io_uring where the kernel allows it, else threads; ``io_reason`` says why.
        direct_io: ``required`` refuses paths without O_DIRECT, ``optional`` falls back to the page cache.
        arena: a ``PinnedArena`` whose slots are read and written; its regions are registered with the kernel.
        queue_depth: requests of ``request_bytes`` in flight per member; of smaller ones as many as make up the same
            bytes, but not more than 16 times as many.
        request_bytes: largest single request, bytes.
        bounce_bytes: the store's own memory for copies, bytes, from the arena when there is one.
        check_reads: compare the checksum of every tile that a batch reads whole, when its ticket is waited for.
        make_engine: builds another engine over the members' descriptors; for tests.
    """

    io_backend: IoBackend = "auto"
    direct_io: DirectIo = "required"
    arena: Arena | None = None
    queue_depth: int = 8
    request_bytes: int = 4 << 20
    bounce_bytes: int = DEFAULT_BOUNCE_BYTES
    check_reads: bool = False
    make_engine: EngineFactory | None = None

    def __post_init__(self) -> None:
        if self.direct_io not in ("required", "optional", "off"):
            raise StoreError(f"direct_io must be 'required', 'optional' or 'off', got {self.direct_io!r}")
        if self.io_backend not in ("auto", "io_uring", "threads"):
            raise StoreError(f"io_backend must be 'auto', 'io_uring' or 'threads', got {self.io_backend!r}")
        for field in ("queue_depth", "request_bytes", "bounce_bytes"):
            whole_number(getattr(self, field), field, least=1)
        if self.bounce_bytes < _MIN_BOUNCE_BYTES or self.bounce_bytes % _MIN_BOUNCE_BYTES:
            raise StoreError(
                f"bounce_bytes must be a multiple of {_MIN_BOUNCE_BYTES:,}, got {self.bounce_bytes:,}"
            )

    def engine(self) -> EngineFactory:
        """Returns what builds the engine over the members' descriptors."""
        if self.make_engine is not None:
            return self.make_engine
        return functools.partial(
            native_engine,
            backend=self.io_backend,
            queue_depth=self.queue_depth,
            request_bytes=self.request_bytes,
            regions=() if self.arena is None else self.arena.regions(),
        )
