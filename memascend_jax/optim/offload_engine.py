# SPDX-License-Identifier: Apache-2.0
"""One offloaded state: made for parameters of certain shapes, stepped through slots, committed with its numbers.

What does not live here: what a user calls (``offload``), and the arithmetic of pieces (``offload_step``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.dtypes import dtype_name
from memascend_jax.errors import ConfigError, MachineError, StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.optim.fused import FusedUpdate
from memascend_jax.optim.offload_coupling import state_owners
from memascend_jax.optim.offload_expected import ExpectedHandle
from memascend_jax.optim.offload_fused import fused_leaves
from memascend_jax.optim.offload_handle import Home, OffloadState, StateReader, serve
from memascend_jax.optim.offload_initial import write_initial_state
from memascend_jax.optim.offload_layout import plan_layout
from memascend_jax.optim.offload_leaf import CompiledUpdates, leaf_updates
from memascend_jax.optim.offload_leaves import NamedLeaves, shape_of
from memascend_jax.optim.offload_record import StateRecord, record_of, with_record
from memascend_jax.optim.offload_stream import StateStream
from memascend_jax.optim.offload_trace import Shape, TracedTransform, shape_struct, trace_transform
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.units import format_bytes, round_up

_log = logging.getLogger(__name__)

#: One is read or written during the update of the other. A generic update makes new arrays beside them, up to a tile.
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What ``offload`` was given, checked; see there."""

    clip_norm: float | None
    nonfinite: Literal["raise", "skip", "keep"]
    commit_every: int | None
    tile_elements: int
    name: str
    overwrite: bool
    grad_dtype: Any
    extra: Mapping[str, Any]


class OffloadEngine:
    """The state of one transform for one pytree of parameters.

    Attributes:
        version: of the state in the store; ``committed_version`` is what a crash would leave.
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
        self.grad_shapes = [_grad_shape(shape, options.grad_dtype) for shape in shapes]
        self.traced = trace_transform(
            tx,
            tree.unflatten(shapes),
            grad_dtypes=[shape.dtype for shape in self.grad_shapes],
            extra=options.extra,
        )
        self.owners = state_owners(self.traced)
        self.updates = leaf_updates(self.traced, self.owners)
        _check_dtypes(self.traced, [update.frozen for update in self.updates])
        self.stored_params = _stored_params(store, params)
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
        self._arena, self.pool = _memory(arena, self.layout.classes, self.layout.slot_bytes)
        self._owns_arena = arena is None
        self.cpu = _cpu_device()
        self.compiled = CompiledUpdates()
        self.stream = StateStream(store, self.pool, self.layout.groups)
        self.handles = ExpectedHandle(self.traced, self.owners, self.updates, self.layout.specs, self.home)
        self.version = self.committed_version = 0
        #: Why the state in the store can be used no more.
        self.broken: str | None = None
        self._reader = StateReader(self.read_state, self.names)
        self._shared = self._compiled_shared()

    def make(self, params: NamedLeaves) -> OffloadState:
        """Returns the handle of a new state, which is in the store, committed.

        Raises:
            StoreError: the store holds a state of this name, or has no room.
        """
        specs = list(self.layout.specs.values())
        present = [spec.name for spec in specs if spec.name in self.store]
        if present and not self.options.overwrite:
            raise StoreError(
                f"store '{self.home.store_path}' has an optimizer state already ('{present[0]}'"
                f"{f' and {len(present) - 1:,} more' if len(present) > 1 else ''}); go on with it by restore(params), "
                "or pass overwrite=True to begin again, or another name= to keep both"
            )
        for name in present:
            self.store.remove(name)
        declared: list[str] = []
        try:
            for spec in specs:
                self.store.declare(spec)
                declared.append(spec.name)
            values = write_initial_state(self, params.values)
            state = self.handles.make(values, 0, 0)
            self.commit(state)
        except BaseException:
            for name in declared:
                self.store.remove(name)
            raise
        serve(self.home, self._reader)
        return state

    def restored(self) -> OffloadState:
        """Returns the handle of the state that the store's last generation holds.

        Raises:
            StoreError: there is none of this name, or it is of another transform or of other parameters.
        """
        record = record_of(self.store.run_state, self.options.name)
        if record is None:
            raise StoreError(
                f"store '{self.home.store_path}' holds no offloaded state called {self.options.name!r}; make one with "
                "init(params)"
            )
        for spec in self.layout.specs.values():
            if spec.name not in self.store or self.store.spec(spec.name) != spec:
                found = self.store.spec(spec.name) if spec.name in self.store else "missing"
                raise StoreError(
                    f"the state in store '{self.home.store_path}' is of another transform or of other parameters: "
                    f"'{spec.name}' should be {spec}, found {found}"
                )
        numbers = self.handles.number_states()
        unknown = {self.traced.state_paths[state] for state in numbers} ^ set(record.values)
        if unknown:
            raise StoreError(
                f"the state in store '{self.home.store_path}' is of another transform: it has other numbers "
                f"({', '.join(sorted(unknown)[:3])})"
            )
        values = {state: record.values[self.traced.state_paths[state]] for state in numbers}
        self.version = self.committed_version = record.version
        serve(self.home, self._reader)
        return self.handles.make(values, record.version, record.skipped)

    def shared_update(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the new values of the shared arrays for the inputs of an update, of which leaves are not needed."""
        found: list[Any] = self._shared(inputs)
        return found

    def numbers(self, state: Any) -> dict[int, np.ndarray]:
        """Returns the numbers of a handle by state array.

        Raises:
            StoreError: it is no handle, or of another store, name, transform or version; says which.
        """
        if self.broken is not None:
            raise StoreError(self.broken)
        version, numbers = self.handles.checked(state)
        self._check_version(version)
        return numbers

    def commit(self, state: OffloadState, user: bytes | None = None) -> int:
        """Makes the state, and all else that was written to the store, the next generation; returns its number."""
        values = self.numbers(state)
        record = StateRecord(
            int(state.version),
            int(state.skipped),
            {self.traced.state_paths[index]: value for index, value in values.items()},
        )
        generation = self.store.commit(with_record(self.store.run_state, self.options.name, record, user))
        self.committed_version = record.version
        return generation

    def roll_back(self) -> None:
        """Makes the last generation's state the newest again, after a step that failed half way."""
        names = [spec.name for spec in self.layout.specs.values()]
        names += [spec.name for spec in self.stored_params.values()]
        self.store.rollback(names)
        # Not what was noted here: the failure may have come between the commit and the note.
        record = record_of(self.store.run_state, self.options.name)
        self.version = self.committed_version = 0 if record is None else record.version

    def read_state(self, state: OffloadState, path: str) -> dict[str, np.ndarray]:
        """Returns the arrays of one leaf; see ``OffloadState.state_of``."""
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

    def close(self) -> None:
        """Gives the slots back; the store stays open."""
        self.pool.close()
        if self._owns_arena:
            self._arena.close()

    def _compiled_shared(self) -> Any:
        program = self.traced.update.sliced(
            [self.traced.state_output(state) for state in self.handles.shared_states()]
        )
        return jax.jit(program.evaluate)

    def _check_version(self, version: int) -> None:
        if version == self.version:
            return
        way = "older" if version < self.version else "newer"
        raise StoreError(
            f"the optimizer state is of version {version:,}, {way} than that in store '{self.home.store_path}', which "
            f"is of version {self.version:,} (committed: {self.committed_version:,}): the arrays on SSD exist once. "
            "Use the state that the last update returned, or restore(params) and the parameters that go with it"
        )


def _cpu_device() -> jax.Device:
    """Raises ``MachineError`` where jax was told to leave the CPU out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MachineError(
            f"an offloaded optimizer computes on jax's CPU backend, which is not there ({error}); name it beside the "
            "other one: JAX_PLATFORMS=cuda,cpu"
        ) from error


def _grad_shape(shape: Shape, dtype: Any) -> Shape:
    return (
        shape
        if dtype is None or not jnp.issubdtype(shape.dtype, jnp.floating)
        else shape_struct(shape.shape, dtype)
    )


def _memory(
    arena: PinnedArena | None, classes: Mapping[str, SizeClass], nbytes: int
) -> tuple[PinnedArena, SlotPool]:
    if arena is None:
        arena = PinnedArena(max(round_up(nbytes, 1 << 12), 1 << 12))
    try:
        return arena, SlotPool(arena, classes)
    except MemoryError as error:
        raise ConfigError(
            f"the arena of {format_bytes(arena.capacity_bytes)} has no room for the slots of the optimizer state, "
            f"{format_bytes(nbytes)} ({error}); give a larger arena, or smaller tile_elements"
        ) from error


def _check_dtypes(traced: TracedTransform, frozen: Sequence[bool]) -> None:
    for name, shape, is_frozen in zip(traced.leaf_paths, traced.leaf_shapes, frozen, strict=True):
        if is_frozen:
            continue
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            raise ConfigError(
                f"the parameter '{name}' is {shape.dtype}: only floating-point leaves can be updated; freeze it "
                "(optax.partition with optax.set_to_zero), or keep it out of the parameters"
            )
        try:
            dtype_name(shape.dtype)
        except ValueError as error:
            raise ConfigError(f"the parameter '{name}' cannot be offloaded: {error}") from None


def _stored_params(store: TensorStore, params: NamedLeaves) -> dict[int, TensorSpec]:
    return {leaf: store.spec(value) for leaf, value in enumerate(params.values) if isinstance(value, str)}
