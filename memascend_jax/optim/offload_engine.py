# SPDX-License-Identifier: Apache-2.0
"""One offloaded state: made for parameters of certain shapes, stepped through slots, committed with its numbers.

What does not live here: what a user calls (``offload``), and the arithmetic of pieces (``offload_step``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.optim.fused import FusedUpdate
from memascend_jax.optim.offload_coupling import state_owners
from memascend_jax.optim.offload_expected import ExpectedHandle
from memascend_jax.optim.offload_fused import fused_leaves
from memascend_jax.optim.offload_handle import Home, OffloadState, StateReader, serve
from memascend_jax.optim.offload_identity import check_identity, check_tensors, identity_of
from memascend_jax.optim.offload_initial import write_initial_state
from memascend_jax.optim.offload_layout import plan_layout
from memascend_jax.optim.offload_leaf import CompiledUpdates, leaf_updates
from memascend_jax.optim.offload_leaves import NamedLeaves, shape_of, without_variables
from memascend_jax.optim.offload_live import LiveState, live_states
from memascend_jax.optim.offload_options import OffloadOptions
from memascend_jax.optim.offload_parameters import check_dtypes, cpu_device, grad_shape, stored_tensors
from memascend_jax.optim.offload_place import StatePlace
from memascend_jax.optim.offload_record import StateRecord, decoded, encoded
from memascend_jax.optim.offload_slots import OffloadSlots
from memascend_jax.optim.offload_stream import StateStream
from memascend_jax.optim.offload_trace import trace_transform
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.units import format_bytes

_log = logging.getLogger(__name__)

#: One is read or written during the update of the other. A generic update makes new arrays beside them, up to a tile.
_SLOTS = 2


class OffloadEngine:
    """The state of one transform for one pytree of parameters.

    It takes memory with ``slots.acquire``, and serves a state from ``make`` or ``restored`` on. Each call is one of
    ``alone``, which keeps other threads out.

    Attributes:
        live: what is true of the state in the store, whichever engine changes it.
    """

    def __init__(
        self,
        tx: Any,
        fused: FusedUpdate | None,
        params: NamedLeaves,
        store: TensorStore,
        arena: PinnedArena | None,
        options: OffloadOptions,
    ) -> None:
        if not params.names:
            raise ConfigError(
                "there are no parameters to optimize: the pytree given to init is empty; with "
                "nnx.Optimizer look at wrt="
            )
        self.store, self.options, self.names = store, options, params.names
        self.home = Home(store.store_id, store.paths[0], options.name)
        shapes = [
            shape_of(value, name, store) for name, value in zip(params.names, params.values, strict=True)
        ]
        tree: Any = jax.tree.structure(params.pure)
        #: What gradients are expected to be.
        self.grad_shapes = [grad_shape(shape, options.grad_dtype) for shape in shapes]
        self.traced = trace_transform(
            tx,
            tree.unflatten(shapes),
            grad_dtypes=[shape.dtype for shape in self.grad_shapes],
            extra=options.extra,
        )
        self.owners = state_owners(self.traced)
        self.updates = leaf_updates(self.traced, self.owners)
        check_dtypes(self.traced, [update.frozen for update in self.updates])
        self.stored_params = stored_tensors(store, params)
        self.fused = fused_leaves(fused, self.traced, self.updates, params.pure)
        self.layout = plan_layout(
            self.traced,
            self.updates,
            self.stored_params,
            target_elements=options.tile_elements,
            slots=_SLOTS,
            prefix=f"{options.name}/" if options.name else "",
        )
        if all(update.frozen for update in self.updates):
            _log.warning("all %d parameters are frozen: updates change nothing", len(self.updates))
        self.slots = OffloadSlots(store, arena, self.layout)
        self.cpu = cpu_device()
        self.compiled = CompiledUpdates()
        self.handles = ExpectedHandle(self.traced, self.owners, self.updates, self.layout.specs, self.home)
        self.identity = identity_of(
            self.traced, self.updates, self.layout.specs, self.stored_params, options.tile_elements
        )
        self._live: LiveState | None = None
        self._reader = StateReader(self.read_state, self.names)
        self._shared = self._compiled_shared()

    @property
    def live(self) -> LiveState:
        """Raises ``StoreError`` before ``make`` or ``restored``."""
        if self._live is None:
            raise StoreError(
                "this offloaded transform has no state yet; call init(params) or restore(params)"
            )
        return self._live

    @property
    def version(self) -> int:
        """Of the state in the store as it is now."""
        return self.live.version

    @property
    def stream(self) -> StateStream:
        """The way of the state between the store and the slots."""
        return self.slots.stream

    def alone(self) -> AbstractContextManager[None]:
        """Keeps other calls out; see ``LiveStates.alone``."""
        return live_states(self.store).alone(self.store)

    def make(self, params: NamedLeaves) -> OffloadState:
        """Returns the handle of a new state, which is in the store, committed.

        Raises:
            StoreError: the store holds a state of this name, or has no room. What it held is there then.
        """
        place = StatePlace(self.store, self.options.name, self.layout.specs, self.home.store_path)
        place.check(overwrite=self.options.overwrite)
        name = self.options.name
        states = live_states(self.store).states
        before = states.get(name)
        live = LiveState(self.store, name, uuid.uuid4().hex[:16], 0)
        place.take()
        live.begin_change()
        try:
            values = write_initial_state(self, params.values)
            self._bind(live)
            state = self.handles.make(values, 0, 0)
            live.end_change()
            self.commit(state)
        except BaseException:
            live.begin_change()
            undone = place.undo()
            if undone:
                self.store.records.roll_back(name)
                live.end_change()
            if before is not None:
                before.version = before.committed_version
                before.broken = None if undone else live.broken
            raise
        if before is not None:
            before.gone = f"the optimizer state in store '{self.home.store_path}' was replaced by another one"
        states[name] = live
        serve(self.home, self._reader)
        return state

    def restored(self) -> OffloadState:
        """Returns the handle of the state that the store's last generation holds; later updates of it are undone.

        Raises:
            StoreError: there is none of this name, it is of another transform or of other parameters, or what was
                changed since cannot be undone.
        """
        name, path = self.options.name, self.home.store_path
        found = self.store.records.committed.get(name)
        if found is None:
            raise StoreError(
                f"store '{path}' holds no offloaded state called {name!r}; make one with init(params)"
            )
        record = decoded(found)
        check_identity(record.identity, self.identity, path)
        check_tensors(self.store, self.layout.specs.values(), self.options.tile_elements)
        numbers = {self.traced.state_paths[state]: state for state in self.handles.number_states()}
        if unknown := numbers.keys() ^ record.values.keys():
            raise StoreError(
                f"the state in store '{path}' is of another transform: it has other numbers "
                f"({', '.join(sorted(unknown)[:3])})"
            )
        states = live_states(self.store).states
        live = states.get(name)
        if live is None:
            live = LiveState(self.store, name, record.state_id, record.version)
        self._bind(live)
        if live.broken is not None or live.version != record.version:
            self._go_back(live)
        self.store.records.roll_back(name)
        states[name] = live
        serve(self.home, self._reader)
        values = {state: record.values[number] for number, state in numbers.items()}
        return self.handles.make(values, record.version, record.skipped)

    def _go_back(self, live: LiveState) -> None:
        """Rolls back; where that is refused, which changes nothing, a whole state stays a whole one."""
        broken = live.broken
        try:
            self.roll_back()
        except StoreError as error:
            if broken is not None:
                raise StoreError(f"{broken} ({error})") from error
            live.end_change()
            raise StoreError(
                f"cannot go back to version {live.committed_version:,} of the optimizer state: {error}. Go on with the "
                f"state of version {live.version:,} that the last update returned, and commit it"
            ) from error

    def _bind(self, live: LiveState) -> None:
        self._live = live
        self.home = self.handles.home = replace(self.home, state_id=live.state_id)

    def shared_update(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the new values of the shared arrays for the inputs of an update, of which leaves are not needed."""
        found: list[Any] = self._shared(inputs)
        return found

    def numbers(self, state: Any) -> dict[int, np.ndarray]:
        """Returns the numbers of a handle by state array.

        Raises:
            StoreError: it is no handle, or of another store, name, transform or version; says which.
        """
        live = self.live
        if live.gone is not None:
            raise StoreError(f"{live.gone}; call restore(params)")
        if live.broken is not None:
            raise StoreError(live.broken)
        version, numbers = self.handles.checked(state)
        self._check_version(version)
        return numbers

    def keep(self, version: int, skipped: int, values: Mapping[int, Any]) -> OffloadState:
        """Makes these numbers those that go with the state's arrays, in every commit; returns the handle."""
        record = StateRecord(
            version,
            skipped,
            {self.traced.state_paths[index]: value for index, value in values.items()},
            self.live.state_id,
            self.identity,
        )
        state = self.handles.make(values, version, skipped)
        self.store.records.set(self.options.name, encoded(record))
        self.live.version = version
        return state

    def commit(self, state: OffloadState, user: bytes | None = None) -> int:
        """Makes the state, and all else that was written to the store, the next generation; returns its number."""
        state = without_variables(state)
        values = self.numbers(state)
        self.keep(int(state.version), int(state.skipped), values)
        return self.store.commit(self.store.run_state if user is None else user)

    def roll_back(self) -> None:
        """Makes the last generation's state the newest again, after a step that failed half way."""
        self.live.begin_change()
        names = [spec.name for spec in self.layout.specs.values()]
        names += [spec.name for spec in self.stored_params.values()]
        self.store.rollback(names)
        self.store.records.roll_back(self.options.name)
        # Not what was noted here: the failure may have come between the commit and the note.
        self.live.version = self.live.committed_version
        self.live.end_change()

    def read_state(self, state: OffloadState, path: str) -> dict[str, np.ndarray]:
        """Returns the arrays of one leaf; see ``OffloadState.state_of``."""
        with self.alone():
            return self._read_state(state, path)

    def _read_state(self, state: OffloadState, path: str) -> dict[str, np.ndarray]:
        values = self.numbers(state)
        if path not in self.names:
            raise KeyError(f"no parameter '{path}' in this state; it has {', '.join(self.names[:8])} …")
        leaf = self.names.index(path)
        found: dict[str, np.ndarray] = {}
        for index, owner in enumerate(self.owners):
            place = self.handles.places[index]
            if owner != leaf or (place is not None and not place.tensor):
                continue
            if place is None:
                found[self.traced.state_paths[index]] = values[index]
            else:
                found[place.tensor.rpartition("#")[2]] = self.store.get(place.tensor)
        return found

    def describe(self) -> str:
        """Returns one line for a screen."""
        kinds = {True: 0, False: 0}
        for update in self.updates:
            if not update.frozen:
                kinds[update.elementwise] += 1
        frozen = len(self.updates) - sum(kinds.values())
        return (
            f"{kinds[True]:,} leaves in tiles ({len(self.fused):,} by fused kernels), {kinds[False]:,} whole, "
            f"{frozen:,} frozen; state {format_bytes(self.layout.state_bytes)} in store '{self.home.store_path}', "
            f"{format_bytes(self.layout.slot_bytes)} of slots in host memory"
        )

    def _compiled_shared(self) -> Any:
        program = self.traced.update.sliced(
            [self.traced.state_output(state) for state in self.handles.shared_states()]
        )
        return jax.jit(program.evaluate)

    def _check_version(self, version: int) -> None:
        if version == self.version:
            return
        way = "older" if version < self.version else "newer"
        committed = self.live.committed_version
        raise StoreError(
            f"the optimizer state is of version {version:,}, {way} than that in store '{self.home.store_path}', which "
            f"is of version {self.version:,} (committed: {committed:,}): the arrays on SSD exist once. "
            "Use the state that the last update returned, or restore(params) and the parameters that go with it"
        )
