# SPDX-License-Identifier: Apache-2.0
"""The tensors of a new offloaded state in the store: taken, also in place of an older state's, or left as they were."""

from __future__ import annotations

from collections.abc import Mapping

from memascend_jax.errors import StoreError
from memascend_jax.optim.offload_identity import tensors_of
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore


class StatePlace:
    """The tensors ``specs`` of the state called ``name``, by state array."""

    def __init__(self, store: TensorStore, name: str, specs: Mapping[int, TensorSpec], path: str) -> None:
        self._store, self._name, self._path = store, name, path
        self._specs = list(specs.values())
        self._owned: list[str] = []
        self._kept: list[str] = []
        self._added: list[str] = []
        self._removed = False

    def check(self, *, overwrite: bool) -> None:
        """Raises ``StoreError`` when there is a state of this name, or a tensor in the way that is none of its own."""
        records, wanted = self._store.records.current, [spec.name for spec in self._specs]
        others = {
            tensor: name
            for name, record in records.items()
            if name != self._name
            for tensor in tensors_of(record.get("of", {})) or ()
        }
        present = [name for name in wanted if name in self._store]
        if self._name in records:
            of = records[self._name].get("of", {})
            listed = tensors_of(of)
            # A record of an earlier release does not list them: those that are in the way are.
            owned = [name for name in wanted if name not in others] if listed is None else listed
            self._owned = [name for name in owned if name in self._store]
        foreign = [name for name in present if name not in self._owned]
        if foreign and overwrite:
            owner = others.get(foreign[0])
            whose = "belongs to no offloaded state" if owner is None else f"is of the state called {owner!r}"
            raise StoreError(
                f"cannot make an optimizer state in store '{self._path}': its tensor '{foreign[0]}' is there already "
                f"and {whose}; pass another name= to offload, or take the tensor out with store.remove"
            )
        if not overwrite and (present or self._name in records):
            first = present[0] if present else (self._owned or ["no tensors"])[0]
            more = len(present) - 1
            raise StoreError(
                f"store '{self._path}' has an optimizer state already ('{first}'"
                f"{f' and {more:,} more' if more > 0 else ''}); go on with it by restore(params), "
                "or pass overwrite=True to begin again, or another name= to keep both"
            )

    def take(self) -> None:
        """Declares the tensors and removes the older state's; raises ``StoreError`` without room, nothing changed."""
        self._kept = [
            spec.name
            for spec in self._specs
            if spec.name in self._owned and self._store.spec(spec.name) == spec
        ]
        removed = [name for name in self._owned if name not in self._kept]
        new = [spec for spec in self._specs if spec.name not in self._kept]
        if removed or new:
            self._store.redeclare(removed, new)
        self._removed, self._added = bool(removed), [spec.name for spec in new]

    def undo(self) -> bool:
        """Leaves what was there; returns whether it could: tensors that were removed need a reopened store."""
        if self._removed or self._store.closed:
            return False
        try:
            self._store.rollback(self._kept)
            for name in self._added:
                self._store.remove(name)
        except StoreError:
            return False
        self._added = []
        return True
