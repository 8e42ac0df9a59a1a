# SPDX-License-Identifier: Apache-2.0
"""The user's pytrees, leaf by leaf and by name: what is given must be what ``init`` was given."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import ConfigError, RunError
from memascend_jax.optim.offload_trace import Shape, path_name, shape_struct
from memascend_jax.storage.tensor_store import TensorStore

_REMEDY = "give leaves like those that init was given"
_GRADIENTS_REMEDY = f"{_REMEDY} (offload has grad_dtype= for gradients of another type)"
_TRACED = (
    "it was called inside jax.jit, nnx.jit or another jax transformation, where no state can come from SSD. Call it "
    "outside, between two jitted functions: jit what computes loss and gradients, then update"
)


@dataclass(frozen=True, slots=True)
class NamedLeaves:
    """A flattened pytree. ``pure`` is the tree without Flax's variables around the arrays, ``tree`` as it was given."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    tree: Any
    pure: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Returns a pytree like the one that was given."""
        return self.tree.unflatten(values)


def named_leaves(tree: Any, what: str) -> NamedLeaves:
    """Returns the leaves of ``tree``.

    Raises:
        RunError: it holds tracers: the call is inside a jax transformation.
        ConfigError: two leaves have one name.
    """
    pure = without_variables(tree)
    found, pure_tree = jax.tree_util.tree_flatten_with_path(pure)
    values = tuple(value for _, value in found)
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise RunError(
            f"the {what} given to an offloaded optimizer {'is' if what.endswith('state') else 'are'} traced: {_TRACED}"
        )
    names = tuple(path_name(path) for path, _ in found)
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ConfigError(
            f"two leaves of the {what} have the name '{twice}': a key with a slash can look like a path; rename it"
        )
    given: Any = jax.tree.structure(tree)
    return NamedLeaves(
        names,
        values,
        given if given.num_leaves == len(values) else pure_tree,
        pure,
    )


def check_untraced() -> None:
    """Raises ``RunError`` inside ``jax.jit`` and its like, also where no argument is traced."""
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RunError(f"an offloaded optimizer cannot be traced: {_TRACED}")


def without_variables(tree: Any) -> Any:
    """Returns ``tree`` with the values of Flax NNX's variables in their place."""
    nnx = sys.modules.get("flax.nnx")
    return tree if nnx is None else nnx.as_pure(tree)


def shape_of(value: Any, name: str, store: TensorStore, what: str = "parameters") -> Shape:
    """Returns the shape of a leaf: an array that can be read, or the name of a tensor in the store.

    Raises:
        ConfigError: it is neither; says which leaf of ``what``.
    """
    leaf = f"the {what.removesuffix('s')} '{name}'"
    if isinstance(value, str):
        spec = store.spec(value)
        return shape_struct(spec.shape, to_dtype(spec.dtype))
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float):
        raise ConfigError(
            f"{leaf} is of type {type(value).__name__}; {what} are jax arrays, numpy arrays"
            + (" or names of tensors in the store" if what == "parameters" else "")
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ConfigError(
            f"{leaf} was deleted: a jitted function that donates its arguments has taken its memory; give the array "
            "that it returned"
        )
    dtype = np.dtype(getattr(value, "dtype", np.float32)) if not isinstance(value, jax.Array) else value.dtype
    if isinstance(value, np.ndarray) and (dtype.hasobject or not dtype.isnative or not value.flags.aligned):
        raise ConfigError(
            f"{leaf} is a numpy array of {dtype} that cannot be read as it is: objects, another byte order, or memory "
            "that is not aligned to its elements; copy it with np.array(..., dtype)"
        )
    return shape_struct(np.shape(value), jax.dtypes.canonicalize_dtype(dtype))


def check_same(
    leaves: NamedLeaves,
    what: str,
    names: Sequence[str],
    shapes: Sequence[Shape],
    store: TensorStore,
    *,
    unchecked: Collection[str] = (),
    may_be_names: bool = True,
) -> tuple[Any, ...]:
    """Returns the values in the order of ``names``.

    Args:
        unchecked: leaves that may be of any shape and type.
        may_be_names: whether a leaf can be the name of a tensor in the store.

    Raises:
        ConfigError: names, shapes or element types are not those of ``init``; says which.
    """
    if leaves.names != tuple(names):
        raise ConfigError(_other_names(leaves.names, what, names))
    for name, value, shape in zip(names, leaves.values, shapes, strict=True):
        if name in unchecked:
            continue
        if isinstance(value, str) and not may_be_names:
            raise ConfigError(f"{what}: '{name}' is the text {value!r}; {what} are jax or numpy arrays")
        found = shape_of(value, name, store, what)
        if (found.shape, found.dtype) != (shape.shape, shape.dtype):
            raise ConfigError(
                f"{what}: '{name}' is {found.dtype}{list(found.shape)}, but the state was made for "
                f"{shape.dtype}{list(shape.shape)}; {_REMEDY if may_be_names else _GRADIENTS_REMEDY}"
            )
    return leaves.values


def _other_names(got: Sequence[str], what: str, expected: Sequence[str]) -> str:
    missing = [name for name in expected if name not in set(got)]
    unknown = [name for name in got if name not in set(expected)]
    parts = []
    if missing:
        parts.append(f"without {_listed(missing)}")
    if unknown:
        near = difflib.get_close_matches(unknown[0], missing or expected, 1)
        parts.append(f"with {_listed(unknown)}" + (f" (was it '{near[0]}'?)" if near else ""))
    difference = " and ".join(parts) or "in another order"
    return (
        f"the {what} are not the {len(expected):,} leaves that the state was made for: they come {difference}; give "
        "the same pytree as to init"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
