# SPDX-License-Identifier: Apache-2.0
"""The host memory that an offloaded state streams through, while it is in use: of an arena, or of one of its own."""

from __future__ import annotations

from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SlotPool
from memascend_jax.optim.offload_layout import OffloadLayout
from memascend_jax.optim.offload_stream import StateStream
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.units import format_bytes, round_up


class OffloadSlots:
    """The slots of one layout. ``arena`` None: an arena of exactly their size is made."""

    def __init__(self, store: TensorStore, arena: PinnedArena | None, layout: OffloadLayout) -> None:
        self._store, self._arena, self._layout = store, arena, layout
        self._own_arena: PinnedArena | None = None
        self._pool: SlotPool | None = None
        self._stream: StateStream | None = None

    @property
    def stream(self) -> StateStream:
        """The way of the state between the store and the slots; raises ``StoreError`` without slots."""
        if self._stream is None:
            raise StoreError("this offloaded transform was closed; make it again and call restore(params)")
        return self._stream

    def acquire(self) -> None:
        """Takes the slots; twice is harmless.

        Raises:
            ConfigError: the user's arena has no room for them, or is closed.
        """
        if self._pool is not None:
            return
        nbytes, arena = self._layout.slot_bytes, self._arena
        if arena is None:
            arena = self._own_arena = PinnedArena(max(round_up(nbytes, 1 << 12), 1 << 12))
        try:
            self._pool = SlotPool(arena, self._layout.classes)
        except MemoryError as error:
            raise ConfigError(
                f"the arena of {format_bytes(arena.capacity_bytes)} has no room for the slots of the optimizer state, "
                f"{format_bytes(nbytes)} ({error}); give a larger arena, or smaller tile_elements"
            ) from error
        except RuntimeError as error:
            raise ConfigError(
                f"the arena cannot lend the slots of the optimizer state ({error}); give another, or none"
            ) from error
        self._stream = StateStream(self._store, self._pool, self._layout.groups)

    def release(self) -> None:
        """Gives the slots back; twice is harmless. The store stays open."""
        pool, arena = self._pool, self._own_arena
        self._pool = self._own_arena = self._stream = None
        if pool is not None:
            pool.close()
        if arena is not None:
            arena.close()
