# SPDX-License-Identifier: Apache-2.0
"""The handle of an offloaded state: marks for arrays on SSD and small numbers; how one is made and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.errors import StoreError
from memascend_jax.optim.offload_handle import (
    Home,
    OffloadState,
    OnDisk,
    as_number,
    as_user_array,
    is_on_disk,
)
from memascend_jax.optim.offload_leaf import LeafUpdate
from memascend_jax.optim.offload_leaves import without_variables
from memascend_jax.optim.offload_trace import TracedTransform
from memascend_jax.storage.tensor_store import TensorSpec


class ExpectedHandle:
    """The handle that goes with one transform, parameters and store.

    Attributes:
        places: for each state array where it is; None: its value is in the handle.
        home: of the handles that are made and accepted.
    """

    def __init__(
        self,
        traced: TracedTransform,
        owners: Sequence[int | None],
        updates: Sequence[LeafUpdate],
        specs: Mapping[int, TensorSpec],
        home: Home,
    ) -> None:
        self._traced, self._owners, self.home = traced, owners, home
        self.places: list[OnDisk | None] = []
        for state, (owner, shape) in enumerate(zip(owners, traced.state_shapes, strict=True)):
            spec = specs.get(state)
            if spec is not None:
                self.places.append(OnDisk(spec.name, spec.dtype, spec.shape))
            elif owner is not None and updates[owner].frozen:
                self.places.append(OnDisk("", shape.dtype.name, shape.shape))
            else:
                self.places.append(None)

    def number_states(self) -> list[int]:
        """Returns the state arrays that are in the handle."""
        return [state for state, place in enumerate(self.places) if place is None]

    def shared_states(self) -> list[int]:
        """Returns the state arrays that all leaves share."""
        return [state for state in self.number_states() if self._owners[state] is None]

    def make(self, values: Mapping[int, Any], version: int, skipped: int) -> OffloadState:
        """Returns a handle with these numbers, on jax's default device as any other state."""
        leaves = [
            as_user_array(values[state], self._traced.state_shapes[state].dtype) if place is None else place
            for state, place in enumerate(self.places)
        ]
        inner = self._traced.state_tree.unflatten(leaves)
        return OffloadState(inner, jnp.int32(version), jnp.int32(skipped), self.home)

    def checked(self, state: Any) -> tuple[int, dict[int, np.ndarray]]:
        """Returns a handle's version, and its numbers by state array.

        Raises:
            StoreError: it is no handle, or of another store, name or transform; says which.
        """
        state = without_variables(state)
        if not isinstance(state, OffloadState):
            raise StoreError(
                f"the optimizer state is a {type(state).__name__}, not what init of this offloaded transform returned"
            )
        home = self.home
        if state.home.store_id != home.store_id:
            raise StoreError(
                f"the optimizer state belongs to store '{state.home.store_path}' ({state.home.store_id[:8]}), not to "
                f"'{home.store_path}' ({home.store_id[:8]})"
            )
        if state.home.name != home.name:
            raise StoreError(f"the optimizer state is called {state.home.name!r}, not {home.name!r}")
        if state.home.state_id != home.state_id:
            raise StoreError(
                f"the optimizer state is not the one in store '{home.store_path}': another was made there since, under "
                "the same name; use the state that its init or last update returned, or restore(params)"
            )
        leaves, tree = jax.tree.flatten(state.inner, is_leaf=is_on_disk)
        if tree != self._traced.state_tree:
            raise StoreError(
                f"the optimizer state is of another transform or of other parameters: its structure is {tree}, not "
                f"{self._traced.state_tree}"
            )
        for what, value in (("version", state.version), ("skipped", state.skipped)):
            number = np.asarray(value)
            if number.shape != () or number.dtype.kind not in "iu":
                raise StoreError(
                    f"the optimizer state's {what} must be a whole number, got {value!r}; give the state that init or "
                    "the last update returned"
                )
        return int(state.version), self._numbers(leaves)

    def _numbers(self, leaves: Sequence[Any]) -> dict[int, np.ndarray]:
        values: dict[int, np.ndarray] = {}
        for index, (leaf, place) in enumerate(zip(leaves, self.places, strict=True)):
            path, shape = self._traced.state_paths[index], self._traced.state_shapes[index]
            if place is not None:
                if leaf != place:
                    raise StoreError(
                        f"the optimizer state is of another transform or of other parameters: '{path}' is {leaf}, not "
                        f"{place}"
                    )
                continue
            value = as_number(leaf, shape.dtype)
            if value.shape != shape.shape:
                raise StoreError(
                    f"'{path}' of the optimizer state has the shape {list(value.shape)}, not {list(shape.shape)}"
                )
            values[index] = value
        return values
