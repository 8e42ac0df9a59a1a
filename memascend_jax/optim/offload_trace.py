# SPDX-License-Identifier: Apache-2.0
"""A transform traced over the shapes of a pytree: nothing is computed and nothing allocated.

The inputs of ``TracedTransform.update`` are the gradients, the state, the parameters and the extra arguments, each
flattened; its outputs the updates and the new state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from memascend_jax.errors import ConfigError
from memascend_jax.optim.offload_program import Program, flatten

Shape = jax.ShapeDtypeStruct


def shape_struct(shape: tuple[int, ...], dtype: Any) -> Shape:
    """Returns a shape with its element type."""
    return Shape(shape, dtype)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class TracedTransform:
    """What ``trace_transform`` found.

    Attributes:
        leaf_paths, leaf_shapes: of the parameters, in the order of the pytree.
        state_paths, state_shapes: of the arrays in the transform's state; ``state_tree`` is its structure.
        init: from parameters to state.
        update: see the module.
        extra_names: of the extra arguments, sorted.
    """

    leaf_paths: tuple[str, ...]
    leaf_shapes: tuple[Shape, ...]
    state_paths: tuple[str, ...]
    state_shapes: tuple[Shape, ...]
    state_tree: Any
    init: Program
    update: Program
    extra_names: tuple[str, ...]

    @property
    def n_leaves(self) -> int:
        return len(self.leaf_paths)

    def head(self, state: int, leaf: int) -> str:
        """Returns what optax calls an array of a leaf's state: its path without the leaf's own."""
        path, own = self.state_paths[state], self.leaf_paths[leaf]
        return (path.removesuffix(own).removesuffix("/") if own else path) or "state"

    def grad_input(self, leaf: int) -> int:
        """Returns the number of the input that is the leaf's gradient."""
        return leaf

    def state_input(self, state: int) -> int:
        """Returns the number of the input that is a state array."""
        return self.n_leaves + state

    def param_input(self, leaf: int) -> int:
        """Returns the number of the input that is the parameter."""
        return self.n_leaves + len(self.state_paths) + leaf

    def extra_input(self, extra: int) -> int:
        """Returns the number of the input that is an extra argument."""
        return 2 * self.n_leaves + len(self.state_paths) + extra

    def state_output(self, state: int) -> int:
        """Returns the position of the output that is a new state array."""
        return self.n_leaves + state


def trace_transform(
    tx: Any,
    params: Any,
    *,
    grad_dtypes: Sequence[Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> TracedTransform:
    """Returns ``tx`` traced for parameters of these shapes.

    Args:
        params: pytree of ``ShapeDtypeStruct``.
        grad_dtypes: dtype of each gradient; default that of its parameter.
        extra: extra arguments of ``update``, numbers or scalar arrays.

    Raises:
        ConfigError: the state does not keep its structure, shapes and dtypes from update to update, or the update needs
            extra arguments.
    """
    extra = {name: scalar_shape(name, value) for name, value in sorted((extra or {}).items())}
    tree: Any
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    shapes = [shape for _, shape in found]
    dtypes = [shape.dtype for shape in shapes] if grad_dtypes is None else grad_dtypes
    grads = tree.unflatten(
        [shape_struct(shape.shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    )
    init_jaxpr, state = jax.make_jaxpr(tx.init, return_shape=True)(params)

    def update(grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        return tx.update(grads, state, params, **extra)

    for _ in range(3):
        try:
            jaxpr, (_, new_state) = jax.make_jaxpr(update, return_shape=True)(grads, state, params, extra)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise ConfigError(
                f"cannot offload this transform: its update does not take what it is given ({error}); offload needs to "
                'know of extra arguments: extra_args={"value": 0.0}, by name and example'
            ) from error
        if _same_shapes(state, new_state):
            break
        # The first update may widen a dtype (gradients wider than parameters); zeros widen exactly.
        state = new_state
    else:
        raise ConfigError(
            "cannot offload this transform: its state changes shape, dtype or structure with every update; "
            "a state on SSD has one layout"
        )
    states, state_tree = jax.tree_util.tree_flatten_with_path(state)
    return TracedTransform(
        leaf_paths=tuple(path_name(path) for path, _ in found),
        leaf_shapes=tuple(shapes),
        state_paths=tuple(path_name(path) for path, _ in states),
        state_shapes=tuple(shape for _, shape in states),
        state_tree=state_tree,
        init=flatten(init_jaxpr),
        update=flatten(jaxpr),
        extra_names=tuple(extra),
    )


def path_name(path: Any) -> str:
    """Returns the name of a leaf: its keys with slashes between."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _same_shapes(state: Any, new_state: Any) -> bool:
    tree: Any
    leaves, tree = jax.tree.flatten(state)
    new_leaves, new_tree = jax.tree.flatten(new_state)
    if tree != new_tree or any(a.shape != b.shape for a, b in zip(leaves, new_leaves, strict=True)):
        raise ConfigError(
            "cannot offload this transform: update returns a state of another structure or shape than init"
        )
    return all(a.dtype == b.dtype for a, b in zip(leaves, new_leaves, strict=True))


def scalar_shape(name: str, value: Any) -> Shape:
    """Returns the shape of an extra argument; raises ``ConfigError`` when it is no number."""
    try:
        array = np.asarray(value)
    except Exception:
        array = np.empty(0, object)
    if array.dtype == object or array.ndim != 0:
        raise ConfigError(
            f"extra argument {name!r} of the update is no number; only numbers can be given to an offloaded transform"
        )
    return shape_struct((), jax.dtypes.canonicalize_dtype(array.dtype))
