# SPDX-License-Identifier: Apache-2.0
"""The right to use a slot of the pool, and when the slot is free again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from memascend_jax._native._core import Slot, SlotExport

if TYPE_CHECKING:
    from memascend_jax.memory.pool import SlotPool


class Pending(Protocol):
    """Work in flight that still touches a slot: an I/O ticket, a copy to a device."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Lease:
    """One slot, lent until ``release``.

    Released, the slot is lent again only when its readers (arrays that alias it) are gone and the pending work that
    ``defer`` named has ended: a slot is never overwritten under somebody who still reads it.

    Threading: a lease may be used and released on another thread than it was taken on, after ``hand_over``.
    Lifetime: views are valid until ``release``; exports as long as their consumer lives.
    """

    __slots__ = ("_pending", "_pool", "_slot", "class_name", "label", "since", "thread_id")

    def __init__(self, pool: SlotPool, slot: Slot, class_name: str, label: str) -> None:
        self._pool = pool
        self._slot: Slot | None = slot
        self._pending: list[Pending] = []
        self.class_name = class_name
        self.label = label or class_name
        self.since = time.monotonic()
        self.thread_id: int | None = threading.get_ident()

    @property
    def slot(self) -> Slot:
        if self._slot is None:
            raise RuntimeError(f"lease '{self.label}' is released; its slot may belong to someone else")
        return self._slot

    @property
    def address(self) -> int:
        return self.slot.address

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes

    @property
    def readers(self) -> int:
        """How many exports of the slot are alive."""
        return self.slot.readers

    def view(self, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0) -> npt.NDArray[Any]:
        """Returns a writable numpy view of the slot's bytes from ``offset``. Not for jax: see ``export``."""
        element = np.dtype(dtype)
        flat = self.slot.view(offset, math.prod(shape) * element.itemsize)
        return flat.view(element).reshape(shape)

    def export(
        self, dtype: str, shape: Sequence[int], offset: int = 0, *, cuda_ordinal: int | None = None
    ) -> SlotExport:
        """Returns a DLPack producer over the slot's bytes from ``offset`` (a multiple of 64).

        It and every array made of it count as readers of the slot until they are dropped. With ``cuda_ordinal`` it
        presents itself as pinned host memory of that CUDA device, which its memory must be registered with.
        """
        return self.slot.dlpack(dtype, tuple(shape), offset, cuda_ordinal)

    def defer(self, pending: Pending) -> None:
        """Keeps the slot from being lent again, once released, until ``pending`` is done."""
        # A lease of a whole run is deferred again and again.
        self._pending = [earlier for earlier in self._pending if not earlier.done()]
        self._pending.append(pending)

    def hand_over(self) -> None:
        """Says that another thread will release this lease, so that its first one may wait for that."""
        self.thread_id = None

    def release(self) -> None:
        """Gives the slot back; it is lent again when its readers and pending work are gone. Twice is harmless."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._pool.take_back(self, slot, self._pending)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._slot is None else f"{self._slot.nbytes:,} bytes"
        return f"Lease({self.label!r}, class {self.class_name!r}, {state})"
