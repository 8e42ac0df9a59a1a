# SPDX-License-Identifier: Apache-2.0
"""The offloaded states of each open store: their versions, known to every transform of the process that serves them.

The arrays on SSD exist once, so what is true of them must not be kept by one of several transforms. The numbers that
go with them are in the store's ``records``, which every commit carries.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from memascend_jax.errors import StoreError
from memascend_jax.optim.offload_record import StateRecord, decoded
from memascend_jax.storage.tensor_store import TensorStore

_STORES: weakref.WeakKeyDictionary[TensorStore, LiveStates] = weakref.WeakKeyDictionary()


class LiveState:
    """One state in an open store.

    Attributes:
        version: of its arrays as they are now.
        broken: why they cannot be used: a change of them is under way, or failed and could not be undone.
        gone: why this state is there no more.
    """

    def __init__(self, store: TensorStore, name: str, state_id: str, version: int) -> None:
        # Weak: a registry that kept its own key alive would keep every store for ever.
        self._store = weakref.ref(store)
        self.name, self.state_id, self.version = name, state_id, version
        self.broken: str | None = None
        self.gone: str | None = None

    def begin_change(self) -> None:
        """Says that the arrays are a mixture from now on: nobody uses or commits them before ``end_change``."""
        store = self._owner()
        self.broken = (
            f"the optimizer state in store '{store.paths[0]}'{f' called {self.name!r}' if self.name else ''} is a "
            "mixture of two steps: an update of it is under way, or failed half way and was not undone. "
            "restore(params) goes back to the last commit where the store can (durability='step'); else close it and "
            "open it again"
        )
        store.records.refuse_commits(self.name, self.broken)

    def end_change(self) -> None:
        """Says that the arrays are whole again."""
        self.broken = None
        self._owner().records.allow_commits(self.name)

    def committed(self) -> StateRecord | None:
        """Returns what the store's last generation has of this state."""
        found = self._owner().records.committed.get(self.name)
        return None if found is None else decoded(found)

    @property
    def committed_version(self) -> int:
        """What a crash would leave."""
        found = self._owner().records.committed.get(self.name)
        return 0 if found is None else int(found["version"])

    def _owner(self) -> TensorStore:
        store = self._store()
        if store is None:
            raise StoreError(f"the store of the optimizer state {self.name!r} is gone; open it again")
        return store


class LiveStates:
    """The states in one open store, by name."""

    def __init__(self) -> None:
        self.states: dict[str, LiveState] = {}
        self._lock = threading.Lock()

    @contextmanager
    def alone(self, store: TensorStore) -> Iterator[None]:
        """Keeps other calls out, of whatever state in the store: a commit of one takes all along.

        Raises:
            StoreError: the store is closed, or another call is under way, in another thread or further up in this one.
        """
        if store.closed:
            raise StoreError(
                f"store '{store.paths[0]}' is closed, and the optimizer state with it; open it again, make the same "
                "offload and call restore(params)"
            )
        if not self._lock.acquire(blocking=False):
            raise StoreError(
                f"an optimizer state in store '{store.paths[0]}' is in use by another thread, or by a call that this "
                "one interrupted: offloaded optimizers take one thread at a time"
            )
        try:
            yield
        finally:
            self._lock.release()


def live_states(store: TensorStore) -> LiveStates:
    """Returns the states in ``store`` that this process works with."""
    found = _STORES.get(store)
    if found is None:
        found = _STORES.setdefault(store, LiveStates())
    return found
