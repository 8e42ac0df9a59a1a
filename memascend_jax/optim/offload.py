# SPDX-License-Identifier: Apache-2.0
"""Any optax transform with its state on SSD: the library's door to the optimizer tier.

What lives here is what a user calls; ``offload_engine`` makes and keeps a state, ``offload_step`` updates it.

Known shortcomings: extra arguments of an update are numbers only; a leaf that is not elementwise (adafactor, muon,
lamb) comes whole into host memory, with its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np

from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.optim.offload_coupling import CouplingError, check_separable
from memascend_jax.optim.offload_engine import OffloadEngine
from memascend_jax.optim.offload_handle import OffloadState, OnDisk
from memascend_jax.optim.offload_leaves import NamedLeaves, check_untraced, named_leaves
from memascend_jax.optim.offload_live import live_states
from memascend_jax.optim.offload_options import OffloadOptions, check_places, checked_options
from memascend_jax.optim.offload_step import step
from memascend_jax.optim.transforms import fused_description
from memascend_jax.storage.tensor_store import TensorStore

__all__ = ["CouplingError", "Offload", "OffloadState", "OnDisk", "offload"]

#: 4 MiB of float32.
DEFAULT_TILE_ELEMENTS = 1 << 20


def offload(
    tx: Any,
    *,
    store: TensorStore,
    arena: PinnedArena | None = None,
    clip_norm: float | None = None,
    nonfinite: Literal["raise", "skip", "keep"] = "raise",
    commit_every: int | None = 1,
    tile_elements: int = DEFAULT_TILE_ELEMENTS,
    name: str = "",
    overwrite: bool = False,
    grad_dtype: Any = None,
    extra_args: Mapping[str, Any] | None = None,
) -> Offload:
    """Returns a transform that does what ``tx`` does and keeps its state in ``store``.

    ``init`` and ``update`` stand in for those of ``tx`` outside of jit: in a loop of your own, ``flax.nnx.Optimizer``,
    a Flax ``TrainState``. The state that they pass around is a small handle. An elementwise transform is carried out
    tile by tile, any other leaf by leaf; never more than three tiles (or leaves) of the state are in host memory.

    Args:
        tx: an optax transform whose leaves are independent. Those of ``memascend_jax.adamw``, ``adam``, ``lion`` and
            ``sgd`` run in fused kernels.
        store: an open store with room for the state; it must stay open, and it must outlive the handle.
        arena: lends the slots; None: an arena of exactly their size is made.
        clip_norm: scale gradients so that the norm over all leaves that are not frozen is at most this.
        nonfinite: what to do about a gradient with inf or nan: raise and change nothing, skip the update, or let it
            through as optax does, unlooked at. Where gradients are finite but a new value is not, raise as well.
        commit_every: every how many updates the store commits, which is what a crash, or a step that fails, goes back
            to; None: only when ``commit`` is called.
        tile_elements: elements of a tile, a multiple of 4,096.
        name: of the state in the store, where it shares that with others.
        overwrite: whether ``init`` may replace a state of that name.
        grad_dtype: of all gradients, where it is not that of the parameters.
        extra_args: extra arguments that ``update`` is given, numbers, with example values.

    Raises:
        ConfigError: an argument out of its range; a ``CouplingError``: ``tx`` couples leaves, by the name of what does.

    Example::

        with memascend_jax.TensorStore.create("/mnt/nvme", capacity="4GiB") as store:
            tx = memascend_jax.offload(optax.adamw(1e-3), store=store, clip_norm=1.0)
            state = tx.init(params)
            for batch in batches:
                grads = grad_function(params, batch)  # jitted
                params, state = tx.apply(grads, state, params)
    """
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise ConfigError(f"offload takes an optax transform, with init and update; got {type(tx).__name__}")
    check_places(store, arena)
    options = checked_options(
        clip_norm=clip_norm,
        nonfinite=nonfinite,
        commit_every=commit_every,
        tile_elements=tile_elements,
        name=name,
        overwrite=overwrite,
        grad_dtype=grad_dtype,
        extra_args=extra_args,
    )
    check_separable(tx, options.extra)
    return Offload(tx, store, arena, options)


class Offload:
    """An optax transform whose state is in a store; ``offload`` makes it.

    Serves one state at a time: a new ``init`` or ``restore`` takes the place of the one before.

    Threading: one thread at a time. Lifetime: ``close`` gives the host memory back; the store belongs to the user.
    """

    def __init__(
        self, tx: Any, store: TensorStore, arena: PinnedArena | None, options: OffloadOptions
    ) -> None:
        self._tx, self._store, self._arena, self._options = tx, store, arena, options
        self._engine: OffloadEngine | None = None

    def init(self, params: Any) -> OffloadState:
        """Returns the handle of a new state for ``params``, written to the store and committed.

        Args:
            params: pytree of jax arrays, numpy arrays, or names of tensors in the store.

        Raises:
            ConfigError: no parameters, a leaf of a type that cannot be updated, or leaves that are coupled.
            StoreError: the store holds a state of this name, or has no room.
            RunError: called inside a jax transformation.
        """
        leaves = named_leaves(params, "parameters")
        return self._begun(leaves, lambda engine: engine.make(leaves))

    def restore(self, params: Any) -> OffloadState:
        """Returns the handle of the state in the store's last commit, for parameters like those of ``init``.

        Updates after that commit are undone, those of parameters in the store too.

        Raises:
            StoreError: there is none of this name, it is of another transform or of other parameters, or the store
                overwrites in place and cannot go back.
        """
        leaves = named_leaves(params, "parameters")
        return self._begun(leaves, lambda engine: engine.restored())

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, OffloadState]:
        """Returns (updates, new handle), as optax does; the state on SSD has changed, so ``state`` is used up.

        Args:
            grads: like the parameters; where they are the updates are, too.
            params: as given to ``init``, with their values now; a tensor in the store is read, not written.

        Raises:
            ConfigError: gradients or parameters are not like those of ``init``; says which.
            StoreError: the handle is of another store, transform or version, or the disk failed.
            NonfiniteError: a gradient, or a number of the transform, is inf or nan. Nothing has changed then.
            RunError: called inside a jax transformation.
        """
        result, new_state = step(self._bound(), grads, state, params, extra, applies=False)
        return result, new_state

    def apply(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, OffloadState]:
        """Returns (new parameters, new handle): ``update`` and ``optax.apply_updates`` in one pass.

        Arrays come back as new arrays in the same place; a tensor in the store is written there, and its name comes
        back. Raises as ``update`` does.
        """
        result, new_state = step(self._bound(), grads, state, params, extra, applies=True)
        return result, new_state

    def commit(self, state: Any, run_state: bytes | None = None) -> int:
        """Makes ``state``, and all else that was written to the store, durable; returns the store's generation.

        Args:
            run_state: bytes of the user's own, kept with it; None: those of the last commit.
        """
        check_untraced()
        named_leaves(state, "optimizer state")
        engine = self._bound()
        with engine.alone():
            return engine.commit(state, run_state)

    @property
    def run_state(self) -> bytes:
        """The user's own bytes of the last commit."""
        return self._store.run_state

    def state_of(self, state: Any, path: str) -> dict[str, np.ndarray]:
        """Returns the arrays of the state of the parameter at ``path``; see ``OffloadState.state_of``."""
        check_untraced()
        named_leaves(state, "optimizer state")
        return self._bound().read_state(state, path)

    @property
    def host_bytes(self) -> int:
        """Bytes of the slots that the state streams through."""
        return self._bound().layout.slot_bytes

    def describe(self) -> str:
        """Returns one line: how many leaves go in tiles, whole and frozen, and the bytes on SSD and in host memory."""
        return self._bound().describe()

    def close(self) -> None:
        """Gives the slots back; twice is harmless. The state stays in the store."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.slots.release()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begun(self, leaves: NamedLeaves, begin: Callable[[OffloadEngine], OffloadState]) -> OffloadState:
        """Takes a new engine into use; one that cannot begin leaves the one before as it was."""
        check_untraced()
        with live_states(self._store).alone(self._store):
            fused = fused_description(self._tx)
            engine = OffloadEngine(self._tx, fused, leaves, self._store, self._arena, self._options)
            before = self._engine
            if before is not None:
                before.slots.release()
            try:
                engine.slots.acquire()
                state = begin(engine)
            except BaseException:
                engine.slots.release()
                if before is not None:
                    before.slots.acquire()
                raise
            self._engine = engine
            return state

    def _bound(self) -> OffloadEngine:
        if self._engine is None:
            raise StoreError(
                "this offloaded transform has no state yet; call init(params) or restore(params) first"
            )
        return self._engine
