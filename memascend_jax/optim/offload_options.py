# SPDX-License-Identifier: Apache-2.0
"""What ``memascend_jax.offload`` is given besides the transform, checked."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.errors import ConfigError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.optim.offload_trace import scalar_shape
from memascend_jax.optim.state_format import BLOCK_BYTES
from memascend_jax.storage.tensor_store import TensorStore

_GRADIENTS = ("float32", "bfloat16", "float16", "float64")


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


def checked_options(
    *,
    clip_norm: Any,
    nonfinite: Any,
    commit_every: Any,
    tile_elements: Any,
    name: Any,
    overwrite: Any,
    grad_dtype: Any,
    extra_args: Any,
) -> OffloadOptions:
    """Returns the options; raises ``ConfigError`` for one that is out of its range or of another type."""
    if nonfinite not in ("raise", "skip", "keep"):
        raise ConfigError(f"nonfinite must be 'raise', 'skip' or 'keep', got {nonfinite!r}")
    if not isinstance(name, str):
        raise ConfigError(f"name must be a text, got {name!r} ({type(name).__name__})")
    if not isinstance(overwrite, bool | np.bool_):
        raise ConfigError(f"overwrite must be True or False, got {overwrite!r}")
    tile = _whole("tile_elements", tile_elements)
    if tile < BLOCK_BYTES or tile % BLOCK_BYTES:
        raise ConfigError(f"tile_elements must be a multiple of {BLOCK_BYTES:,}, got {tile:,}")
    every = None if commit_every is None else _whole("commit_every", commit_every)
    if every is not None and every < 1:
        raise ConfigError(f"commit_every must be at least 1, got {every}; None commits on request only")
    return OffloadOptions(
        clip_norm=None if clip_norm is None else _clip_norm(clip_norm),
        nonfinite=nonfinite,
        commit_every=every,
        tile_elements=tile,
        name=name,
        overwrite=bool(overwrite),
        grad_dtype=None if grad_dtype is None else _grad_dtype(grad_dtype),
        extra=_extra(extra_args),
    )


def check_places(store: Any, arena: Any) -> None:
    """Raises ``ConfigError`` when ``store`` is no open store that can be written, or ``arena`` no arena."""
    if not isinstance(store, TensorStore):
        raise ConfigError(f"store must be an open TensorStore, got {type(store).__name__}")
    if store.closed:
        raise ConfigError(f"store '{store.paths[0]}' is closed; open it again")
    if store.read_only:
        raise ConfigError(f"store '{store.paths[0]}' was opened read-only; open it for writing")
    if arena is not None and not isinstance(arena, PinnedArena):
        raise ConfigError(f"arena must be a PinnedArena or None, got {arena!r} ({type(arena).__name__})")


def _whole(what: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} must be a whole number, got {value!r} ({type(value).__name__})") from None


def _clip_norm(value: Any) -> float:
    """The norm is compared in float32, where a number may be zero or infinite that is not in float64."""
    if isinstance(value, bool | np.bool_) or not (
        isinstance(value, numbers.Real) or (isinstance(value, jax.Array | np.ndarray) and value.shape == ())
    ):
        raise ConfigError(f"clip_norm must be a positive number, got {value!r} ({type(value).__name__})")
    number = float(value)
    with np.errstate(over="ignore", under="ignore"):
        narrow = float(np.float32(number))
    if not (math.isfinite(narrow) and narrow > 0):
        raise ConfigError(
            f"clip_norm must be a positive number, got {number} ({narrow} in float32); None is no clipping"
        )
    return number


def _grad_dtype(value: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(value))
        same = np.dtype(value) == dtype
    except TypeError:
        raise ConfigError(f"grad_dtype must be an element type, got {value!r}") from None
    if not same or dtype.name not in _GRADIENTS or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"grad_dtype must be one of {', '.join(_GRADIENTS)} (the last with jax_enable_x64), got {value!r}"
        )
    return dtype


def _extra(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"extra_args must be the example values of extra arguments by their names, got {value!r}"
        )
    for name, example in value.items():
        scalar_shape(name, example)
    return dict(value)
