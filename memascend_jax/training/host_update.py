# SPDX-License-Identifier: Apache-2.0
"""The update of state that is whole in host memory: in place, on its own thread, beside the next step's forward.

Groups go in the order in which the forward needs them; a stage waits until its tensors are through. Nothing is moved,
so the update never waits for a reader as the one that streams from SSD does (``training.update_stream``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

from memascend_jax.errors import RunError
from memascend_jax.observe import trace
from memascend_jax.training.model_layout import ModelLayout, UpdateGroup

#: Applies the optimizer to one group, in place.
ApplyGroup = Callable[[UpdateGroup], None]
_Queue = SimpleQueue[tuple[int, ApplyGroup] | None]


class HostUpdate:
    """Runs one update at a time and knows how far it is.

    Args:
        on_updated: told each tensor that is through, on the update's thread.
        on_failed: told that no further tensor will be, on the update's thread; ``check`` then raises the reason.

    Threading: driven by one thread. Lifetime: ``close`` ends the thread; an update under way is given up.
    """

    def __init__(
        self, layout: ModelLayout, on_updated: Callable[[str], None], on_failed: Callable[[], None]
    ) -> None:
        self._layout = layout
        self._on_updated = on_updated
        self._on_failed = on_failed
        self._sizes = {tensor.name: tensor.elements for tensor in layout.trained}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memascend-update")
        self._queue: _Queue = SimpleQueue()
        self._left: list[int] = []
        self._running: Future[None] | None = None
        self._handing_over = False
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._updated: dict[str, int] = {}
        self._abandoned = False

    def start(self) -> None:
        """Starts an update of the groups of ``add``, which ends after ``add_rest``; the one before is finished."""
        self._updated = dict.fromkeys(self._sizes, 0)
        self._handing_over = False
        self._queue = SimpleQueue()
        self._left = list(range(len(self._layout.update_groups)))
        self._running = self._executor.submit(self._run, self._queue)
        self._running.add_done_callback(self._wake)

    def add(self, index: int, apply: ApplyGroup) -> None:
        """Gives a group to the update, whose gradients are there and which nobody reads before ``add_rest``."""
        self._left.remove(index)
        self._queue.put((index, apply))

    def add_rest(self, apply: ApplyGroup) -> None:
        """Gives all other groups to the update; from now on ``wait`` waits for the new version."""
        self._handing_over = True
        for index in self._left:
            self._queue.put((index, apply))
        self._queue.put(None)

    def is_through(self, tensor: str, end: int | None = None) -> bool:
        """Returns whether ``wait`` would return at once: always for a frozen tensor."""
        if self._running is None or not self._handing_over or tensor not in self._sizes:
            return True
        return self._updated[tensor] >= (self._sizes[tensor] if end is None else end)

    def wait(self, tensor: str, end: int | None = None) -> None:
        """Waits until the elements of ``tensor`` before ``end`` (default: all) are updated.

        Returns at once before ``add_rest``. Raises what the update failed with.
        """
        if self.is_through(tensor, end):
            return
        running = self._running
        assert running is not None, "nothing is through only while an update runs"
        with self._changed:
            self._changed.wait_for(lambda: self.is_through(tensor, end) or running.done())
        if self.is_through(tensor, end):
            return
        running.result()
        raise RunError(f"the update ended without '{tensor}'")

    def check(self) -> None:
        """Raises what the running update failed with, if it has; waits for nothing."""
        if self._running is not None and self._running.done():
            self._running.result()

    def finish(self) -> None:
        """Waits for the end of the running update; raises what it failed with."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def give_up(self) -> None:
        """Ends the running update at its next group, and waits for that; no other one may be started."""
        with self._changed:
            self._abandoned = True
        # It may be waiting for a group.
        self._queue.put(None)
        if self._running is not None:
            wait([self._running])
            self._running = None

    def close(self) -> None:
        self.give_up()
        self._executor.shutdown()

    def _run(self, queue: _Queue) -> None:
        with trace.span(trace.PHASE, "update"):
            while (work := queue.get()) is not None:
                if self._abandoned:
                    raise RunError("the update was given up")
                index, apply = work
                group = self._layout.update_groups[index]
                apply(group)
                self._book(group)

    def _book(self, group: UpdateGroup) -> None:
        with self._changed:
            for piece in group.pieces:
                self._updated[piece.tensor] = piece.start + piece.n_elements
            self._changed.notify_all()
        for tensor in dict.fromkeys(piece.tensor for piece in group.pieces):
            if self._updated[tensor] == self._sizes[tensor]:
                self._on_updated(tensor)

    def _wake(self, ended: Future[None]) -> None:
        if ended.exception() is not None:
            self._on_failed()
        with self._changed:
            self._changed.notify_all()
