# SPDX-License-Identifier: Apache-2.0
"""What an offloaded transform asks of its parameters and of jax before it plans anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memascend_jax.dtypes import dtype_name
from memascend_jax.errors import ConfigError, MachineError
from memascend_jax.optim.offload_leaves import NamedLeaves
from memascend_jax.optim.offload_trace import Shape, TracedTransform, shape_struct
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore


def cpu_device() -> jax.Device:
    """Returns the device that computes; raises ``MachineError`` where jax was told to leave the CPU out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise MachineError(
            f"an offloaded optimizer computes on jax's CPU backend, which is not there ({error}); name it beside the "
            "other one: JAX_PLATFORMS=cuda,cpu"
        ) from error


def grad_shape(shape: Shape, dtype: Any) -> Shape:
    """Returns what the gradient of a parameter is; ``dtype`` None: of the parameter's own type."""
    return (
        shape
        if dtype is None or not jnp.issubdtype(shape.dtype, jnp.floating)
        else shape_struct(shape.shape, dtype)
    )


def check_dtypes(traced: TracedTransform, frozen: Sequence[bool]) -> None:
    """Raises ``ConfigError`` when a leaf that is not frozen cannot be updated, or not be stored."""
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


def stored_tensors(store: TensorStore, params: NamedLeaves) -> dict[int, TensorSpec]:
    """Returns the parameters that are tensors of the store, by leaf; raises ``ConfigError`` when two are one."""
    found: dict[int, TensorSpec] = {}
    leaves: dict[str, str] = {}
    for leaf, (name, value) in enumerate(zip(params.names, params.values, strict=True)):
        if isinstance(value, str):
            if value in leaves:
                raise ConfigError(
                    f"parameters: '{name}' is the tensor '{value}' of the store, and so is '{leaves[value]}': an "
                    "update would write it twice; give each leaf a tensor of its own"
                )
            leaves[value] = name
            found[leaf] = store.spec(value)
    return found
