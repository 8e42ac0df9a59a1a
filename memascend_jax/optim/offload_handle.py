# SPDX-License-Identifier: Apache-2.0
"""What a user holds of an optimizer state that lies on SSD: a small pytree that says where the arrays are.

It has the structure of the transform's own state. Numbers that belong to no single leaf (counts, hyperparameters) are
in it as they are in optax; each array of a leaf is an ``OnDisk``, which has no children. So ``jax.tree`` functions, a
``TrainState``, ``flax.nnx.Optimizer`` and checkpointers carry it like any other state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.units import counted, format_bytes

#: Reads the state of one leaf, for the handles of a store and name; gone with the transform that serves them.
_READERS: weakref.WeakValueDictionary[tuple[str, str], StateReader] = weakref.WeakValueDictionary()


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class OnDisk:
    """An array of the state that lies in the store.

    Attributes:
        tensor: its name there; empty when the leaf is frozen and nothing is kept.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return int(np.prod(self.shape)) * to_dtype(self.dtype).itemsize if self.tensor else 0

    def __repr__(self) -> str:
        shape = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"OnDisk({self.tensor!r}, {shape})" if self.tensor else f"Frozen({shape})"


class StateReader:
    """Reads the arrays of one leaf's state. ``paths`` are the leaves that have any."""

    def __init__(
        self, read: Callable[[OffloadState, str], dict[str, np.ndarray]], paths: tuple[str, ...]
    ) -> None:
        self.read = read
        self.paths = paths


@dataclass(frozen=True, slots=True)
class Home:
    """Which store a handle belongs to: its id, its path for messages, the name of the state in it, and the state's id,
    which another state of that name does not have."""

    store_id: str
    store_path: str
    name: str
    state_id: str = ""


@dataclass(frozen=True)
class OffloadState:
    """The handle of a state on SSD.

    Attributes:
        inner: the transform's state with ``OnDisk`` in place of the leaves' arrays. Its numbers may be replaced, as
            those of ``optax.inject_hyperparams`` are.
        version: how many updates the state on SSD has seen; a handle goes with one version only.
        skipped: how many updates were skipped because of gradients that were not finite.
        home: which store it belongs to.
    """

    inner: Any
    version: Any
    skipped: Any
    home: Home = field(metadata={"static": True})

    def state_of(self, path: str) -> dict[str, np.ndarray]:
        """Returns the state of the parameter at ``path`` as new arrays, by name.

        Raises:
            StoreError: the transform that this handle came from is closed, or the handle is not of its version.
            KeyError: no such parameter; the nearest names are told.
        """
        reader = _READERS.get((self.home.store_id, self.home.name))
        if reader is None:
            raise StoreError(
                f"cannot read the state of '{path}': no open transform serves store '{self.home.store_path}'; make it "
                "again with offload(..., store=) and call its restore(params)"
            )
        return reader.read(self, path)

    def on_disk(self) -> Mapping[str, OnDisk]:
        """Returns where the arrays are, by the name of their tensor."""
        leaves = jax.tree.leaves(self.inner, is_leaf=is_on_disk)
        return {leaf.tensor: leaf for leaf in leaves if is_on_disk(leaf) and leaf.tensor}

    def __repr__(self) -> str:
        arrays = self.on_disk()
        nbytes = sum(array.nbytes for array in arrays.values())
        numbers = ", ".join(
            f"{jax.tree_util.keystr(path, simple=True, separator='/')}={_short(value)}"
            for path, value in jax.tree_util.tree_flatten_with_path(self.inner)[0][:8]
        )
        return (
            f"OffloadState(version {_short(self.version)}, {counted(len(arrays), 'array', 'arrays')} "
            f"({format_bytes(nbytes)}) in store '{self.home.store_path}'{': ' + numbers if numbers else ''})"
        )


jax.tree_util.register_dataclass(OffloadState, ["inner", "version", "skipped"], ["home"])


def is_key(dtype: Any) -> bool:
    """Returns whether ``dtype`` is that of jax's typed random keys, which numpy does not know."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def as_user_array(value: Any, dtype: Any) -> Any:
    """Returns a number of the state on jax's default device, as any other state's; a typed random key as it is."""
    return value if is_key(dtype) else jnp.asarray(np.asarray(value), dtype)


def as_number(value: Any, dtype: Any) -> Any:
    """Returns a number of a handle for computing with it on the host: a numpy array, or a typed random key."""
    return value if is_key(dtype) else np.asarray(value, dtype)


def serve(home: Home, reader: StateReader) -> None:
    """Lets handles of ``home`` read through ``reader`` for as long as that lives."""
    _READERS[home.store_id, home.name] = reader


def is_on_disk(node: Any) -> bool:
    """For ``is_leaf``."""
    return isinstance(node, OnDisk)


def _short(value: Any) -> str:
    shape = getattr(value, "shape", ())
    if shape:
        return f"{value.dtype}{list(shape)}"
    try:
        return f"{value:g}" if isinstance(value, float) else str(value)
    except Exception:
        return type(value).__name__
