# SPDX-License-Identifier: Apache-2.0
"""A store's contents written once more, changed, into a new store: tile by tile, and nothing of the old one is touched
before the new one is whole and on disk. jax-free.

The new store takes the place of the old one by one rename, or lies elsewhere (``into``). Killed at any instant this
leaves the old store as it was, and at most a hidden file beside it, which the next attempt removes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.observe.screen import Screen
from memascend_jax.optim.format_conversion import Rounding, TileState, convert_tile
from memascend_jax.optim.rounding import split_master
from memascend_jax.optim.state_format import BLOCK_BYTES, StateFormat, itemsize, tile_elements
from memascend_jax.recipes.new_store import new_store
from memascend_jax.storage.ahead import ahead
from memascend_jax.storage.device import block_device_bytes, resolve_paths
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.storage.tile_stream import TileStream
from memascend_jax.training.stored_state import StoredState, state_specs, write_state
from memascend_jax.units import round_up

#: Returns fp32 values ``[n_rows * columns]`` of new rows of a tensor: ``rows(name, first_row, n_rows)``.
NewRows = Callable[[str, int, int], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What becomes of a store.

    Attributes:
        run_state: of the new store.
        format: state format that every parameter gets; None: the one it has.
        shapes: of the parameters whose number of rows changes.
        new_rows: values of the rows that are added.
        target_tile_elements: what a table with another number of rows is cut by.
        seed, step: what stochastic rounding draws by, beside the tensor's name.
        least_scratch_bytes: room for what a step puts away, if the old store has less.
        replaced: contents of tensors that are neither parameters nor state.
    """

    run_state: bytes
    format: StateFormat | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    new_rows: NewRows | None = None
    target_tile_elements: int = 1 << 20
    seed: int = 0
    step: int = 0
    least_scratch_bytes: int = 0
    replaced: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def rewrite_store(
    old: TensorStore,
    state: StoredState,
    change: Rewrite,
    into: Sequence[str] | None,
    screen: Screen,
) -> dict[str, Any]:
    """Leaves the store that ``change`` describes at ``into``, or in the place of ``old``.

    Args:
        old: opened read-only, which keeps writers away.
        into: paths of the new store; None: the path of the old one, which must be one file.

    Returns:
        ``paths`` and ``bytes`` of the new store.

    Raises:
        StoreError: there is something at ``into``, no room, ``old`` cannot be replaced by a rename, or what is read
            does not match its checksum. Nothing has changed then.
    """
    target = resolve_paths(into) if into is not None else _own_path(old)
    specs = [spec for name in state.parameters for spec in _specs_of(old, state, change, name)]
    others = [(old.spec(name), change.replaced.get(name)) for name in state.others]
    specs += [spec if new is None else _spec_of(spec.name, new) for spec, new in others]
    specs += [_spec_of(name, new) for name, new in change.replaced.items() if name not in state.others]
    scratch = max(int(old.inspect()["scratch_bytes"]), change.least_scratch_bytes)
    scratch += sum(_more_gradients(state, change, name) for name in change.shapes)
    with new_store(
        specs,
        target,
        screen,
        scratch_bytes=scratch,
        weights=_weights(old, target),
        like=old,
        replaces=into is None,
    ) as (new, nbytes):
        parameters = len(state.parameters)
        with screen.progress("writing the new store", parameters) as advance, TileStream(new) as stream:
            for name in state.parameters:
                _write_parameter(stream, state, change, name)
                advance(name)
        for name in state.others:
            if name not in change.replaced:
                _copy(old, new, name)
        for name, values in change.replaced.items():
            new.write_elements(name, 0, values.reshape(-1))
        new.commit(change.run_state)
    return {"paths": target, "bytes": nbytes}


def _more_gradients(state: StoredState, change: Rewrite, name: str) -> int:
    """How many more bytes the gradient of a tensor takes in the scratch of a run's store."""
    if not state.is_trained(name):
        return 0
    size = itemsize(state.format_of(name).grad_dtype)
    held, needed = (math.prod(shape) * size for shape in (state.shape(name), change.shapes[name]))
    return max(round_up(needed, BLOCK_BYTES) - round_up(held, BLOCK_BYTES), 0)


def _own_path(old: TensorStore) -> list[str]:
    if len(old.paths) == 1 and block_device_bytes(old.paths[0]) is None:
        return list(old.paths)
    raise StoreError(
        f"cannot replace the store '{', '.join(old.paths)}' by one rename, as it is not one file; nothing was changed. "
        "Give the new one another place: --into PATH, once per member"
    )


def _weights(old: TensorStore, target: Sequence[str]) -> list[int]:
    weights = [int(member["weight"]) for member in old.inspect()["members"]]
    return weights if len(weights) == len(target) else [1] * len(target)


def _specs_of(old: TensorStore, state: StoredState, change: Rewrite, name: str) -> list[TensorSpec]:
    fmt, shape = _new_format(state, change, name), change.shapes.get(name, state.shape(name))
    spec, tile = old.spec(name), _new_tile(state, change, name)
    return state_specs(fmt, name, shape, tile, row_access=spec.row_access, mutable=spec.mutable)


def _new_format(state: StoredState, change: Rewrite, name: str) -> StateFormat:
    """What has no state has none in any format."""
    if change.format is None or not state.is_trained(name):
        return state.format_of(name)
    return change.format


def _new_tile(state: StoredState, change: Rewrite, name: str) -> int:
    if name in change.shapes:
        return tile_elements(change.shapes[name], change.target_tile_elements)
    return state.tile_elements(name)


def _spec_of(name: str, values: NDArray[Any]) -> TensorSpec:
    return TensorSpec(name, values.dtype.name, values.shape)


def _write_parameter(stream: TileStream, state: StoredState, change: Rewrite, name: str) -> None:
    fmt, shape = _new_format(state, change, name), change.shapes.get(name, state.shape(name))
    total, tile = math.prod(shape), _new_tile(state, change, name)
    for number, tile_state in enumerate(ahead(_tiles(state, change, fmt, name, total, tile))):
        write_state(stream, fmt, name, number, total, tile, tile_state)


def _tiles(
    state: StoredState, change: Rewrite, fmt: StateFormat, name: str, total: int, tile: int
) -> Iterator[TileState]:
    """The tiles of the new tensor: what the old one has of each, converted, and new rows behind it."""
    before = math.prod(state.shape(name))
    for start in range(0, max(total, 1), tile):
        end = min(start + tile, total)
        kept = max(min(end, before) - start, 0)
        parts = []
        if kept or not total:
            draws = Rounding(change.seed, change.step, name, start)
            parts.append(convert_tile(state.format_of(name), fmt, state.read(name, start, kept), draws))
        if start + kept < end:
            parts.append(_added(state, change, fmt, name, start + kept, end))
        yield parts[0] if len(parts) == 1 else _joined(fmt, parts, end - start)


def _added(
    state: StoredState, change: Rewrite, fmt: StateFormat, name: str, start: int, end: int
) -> TileState:
    """Elements ``[start, end)`` of new rows, their moments zero."""
    columns = state.shape(name)[-1]
    first, last = start // columns, -(-end // columns)
    assert change.new_rows is not None, "rows are added only where their values are known"
    rows = change.new_rows(name, first, last - first)
    param, leaves = split_master(
        fmt, np.ascontiguousarray(rows[start - first * columns : end - first * columns])
    )
    for leaf in fmt.leaves:
        if leaf.suffix not in leaves:
            leaves[leaf.suffix] = np.zeros(leaf.values(end - start), to_dtype(leaf.dtype))
    return TileState(param, leaves)


def _joined(fmt: StateFormat, parts: Sequence[TileState], n: int) -> TileState:
    """One tile of ``n`` elements; of a group of scales that both parts share the first part's count."""
    leaves = {}
    for leaf in fmt.leaves:
        values = np.concatenate([part.leaves[leaf.suffix] for part in parts])
        if leaf.per > 1:
            values = np.zeros(leaf.values(n), to_dtype(leaf.dtype))
            values[: parts[0].leaves[leaf.suffix].size] = parts[0].leaves[leaf.suffix]
        leaves[leaf.suffix] = values
    return TileState(np.concatenate([part.param for part in parts]), leaves)


def _copy(old: TensorStore, new: TensorStore, name: str) -> None:
    for tile in range(old.tiles(name)):
        start, n = old.tile_span(name, tile)
        new.write_elements(name, start, old.read_elements(name, start, n))
