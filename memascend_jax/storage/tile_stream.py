# SPDX-License-Identifier: Apache-2.0
"""Arrays into a store, tile by tile, with several tiles on their way at once: for imports and conversions."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.errors import StoreError
from memascend_jax.storage.engine import ReusedBuffers, address_of

if TYPE_CHECKING:
    from memascend_jax.storage.tensor_store import TensorStore
    from memascend_jax.storage.ticket import Ticket

#: Bytes on their way that are waited for before more are sent.
_IN_FLIGHT_BYTES = 96 << 20


class TileStream:
    """Writes like ``TensorStore.write_elements``, but does not wait; leaving the block well does.

    Threading: one thread. Lifetime: what is given to ``write`` is copied.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._buffers = ReusedBuffers(64)
        self._flying: deque[tuple[Ticket, int]] = deque()
        self._bytes = 0

    def write(self, name: str, start: int, values: NDArray[Any]) -> None:
        """Writes whole tiles of ``name`` from element ``start`` on.

        Raises:
            StoreError: ``values`` do not begin and end at tiles, or an earlier write failed.
        """
        tiles = self._store.tiles(name)
        size = self._store.tile_span(name, 0)[1]
        flat, tile = values.reshape(-1), start // max(size, 1)
        done = 0
        while done < flat.size or (flat.size == 0 and done == 0):
            first, count = self._store.tile_span(name, tile) if tile < tiles else (-1, 0)
            if first != start + done or count > flat.size - done:
                raise StoreError(
                    f"cannot write elements [{start:,}, {start + flat.size:,}) of tensor '{name}': they are not whole "
                    f"tiles of {size:,} elements"
                )
            self._send(name, tile, flat[done : done + count])
            done, tile = done + max(count, 1), tile + 1

    def finish(self) -> None:
        """Waits for everything; raises ``StoreError`` when a write failed."""
        while self._flying:
            self._wait()

    def __enter__(self) -> TileStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The store waits for what is on its way when it closes.
        if kind is None:
            self.finish()

    def _send(self, name: str, tile: int, values: NDArray[Any]) -> None:
        spec = self._store.spec(name)
        memory = self._buffers.take(
            max(self._store.slot_bytes(values.size, spec.dtype), self._store.block_bytes)
        )
        memory[: values.nbytes] = np.ascontiguousarray(values).view(np.uint8)
        batch = self._store.batch()
        batch.write_tile(name, tile, address_of(memory))
        while self._flying and self._bytes + memory.nbytes > _IN_FLIGHT_BYTES:
            self._wait()
        self._flying.append((batch.submit(memory), memory.nbytes))
        self._bytes += memory.nbytes

    def _wait(self) -> None:
        ticket, nbytes = self._flying.popleft()
        self._bytes -= nbytes
        ticket.wait()
