# SPDX-License-Identifier: Apache-2.0
"""The training state in a store, read and written by ranges of a tensor's elements. jax-free.

It goes by what the store itself says of its tensors, not by a plan: for conversions, copies and exports, whose memory
is that of a few tiles. The step has ways of its own, without copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.optim.format_conversion import TileState
from memascend_jax.optim.state_format import MASTER, RESIDUAL, Leaf, StateFormat
from memascend_jax.storage.engine import ReusedBuffers
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.storage.tile_stream import TileStream


class StoredState:
    """The parameters of ``store`` and their state in ``fmt``; None: parameters alone, each in a type of its own.

    A parameter without any leaf is frozen: it has no state. Names of parameters have no ``#``.

    Threading: one thread reads.

    Attributes:
        parameters: names in the order in which they were declared.
        others: names of tensors that are neither a parameter nor the state of one.

    Raises:
        StoreError: leaves are missing, or of another type or size than the format has.
    """

    def __init__(self, store: TensorStore, fmt: StateFormat | None) -> None:
        self._format = fmt
        self._store = store
        self._buffers = ReusedBuffers(16)
        names = store.names()
        leaves = () if fmt is None else fmt.leaves
        self.parameters = [name for name in names if "#" not in name]
        self._trained = {
            name for name in self.parameters if any(name + leaf.suffix in store for leaf in leaves)
        }
        state = {name + leaf.suffix for name in self.parameters for leaf in leaves}
        self.others = [name for name in names if "#" in name and name not in state]
        faults = [fault for name in self.parameters for fault in self._faults(name)]
        if faults or not self.parameters:
            raise StoreError(
                f"the store '{', '.join(store.paths)}' does not hold what "
                f"{'a model has' if fmt is None else f'state format {fmt.name} has'}: "
                f"{'; '.join(faults[:8]) or 'it has no parameters'}. Choose another store"
            )

    def is_trained(self, name: str) -> bool:
        """Returns whether a parameter has state."""
        return name in self._trained

    def format_of(self, name: str) -> StateFormat:
        """Returns the format of one parameter."""
        if self._format is not None and self.is_trained(name):
            return self._format
        dtype = self._store.spec(name).dtype
        return StateFormat("none", dtype, dtype, ())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter."""
        return self._store.spec(name).shape

    def tile_elements(self, name: str) -> int:
        """Returns the elements of a tile of a parameter."""
        return self._store.spec(name).tile_elements or max(math.prod(self.shape(name)), 1)

    def read(self, name: str, start: int, n: int, *, masters_only: bool = False) -> TileState:
        """Returns ``n`` elements from ``start``, a multiple of a group of scales, with their state.

        Args:
            masters_only: leave out the moments, and the parameter where there is a master.

        Raises:
            StoreError: what is read does not match its checksum, or was never written.
        """
        fmt = self.format_of(name)
        leaves = {
            leaf.suffix: self._read_leaf(name, leaf, start, n)
            for leaf in fmt.leaves
            if not masters_only or leaf.suffix in (MASTER, RESIDUAL)
        }
        if masters_only and fmt.has_master:
            return TileState(np.empty(0, to_dtype(fmt.param_dtype)), leaves)
        return TileState(self._store.read_elements(name, start, n, self._buffers), leaves)

    def _read_leaf(self, name: str, leaf: Leaf, start: int, n: int) -> NDArray[Any]:
        if leaf.per == 1:
            return self._store.read_elements(name + leaf.suffix, start, n, self._buffers)
        tile, end = self.tile_elements(name), start + n
        parts = []
        while start < end:
            number, within = divmod(start, tile)
            count = min(tile - within, end - start)
            first = number * leaf.stride(tile) + within // leaf.per * leaf.width
            parts.append(self._store.read_elements(name + leaf.suffix, first, leaf.values(count)))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _faults(self, name: str) -> Iterator[str]:
        fmt, elements, tile = self.format_of(name), math.prod(self.shape(name)), self.tile_elements(name)
        if self._store.spec(name).dtype != fmt.param_dtype:
            yield f"'{name}' is {self._store.spec(name).dtype}, expected {fmt.param_dtype}"
        for leaf in fmt.leaves:
            if name + leaf.suffix not in self._store:
                yield f"'{name}{leaf.suffix}' is missing"
                continue
            spec, expected = self._store.spec(name + leaf.suffix), leaf.total(elements, tile)
            if spec.dtype != leaf.dtype or math.prod(spec.shape) != expected:
                yield (
                    f"'{name}{leaf.suffix}' has {math.prod(spec.shape):,} elements of {spec.dtype}, expected "
                    f"{expected:,} of {leaf.dtype}"
                )


def state_specs(
    fmt: StateFormat, name: str, shape: tuple[int, ...], tile: int, *, row_access: bool, mutable: bool = True
) -> list[TensorSpec]:
    """Returns the store's tensors of one parameter: itself, and its state leaves."""
    specs = [TensorSpec(name, fmt.param_dtype, shape, tile, row_access=row_access, mutable=mutable)]
    for leaf in fmt.leaves:
        values = leaf.total(math.prod(shape), tile)
        held = shape if leaf.per == 1 else (values // leaf.width, leaf.width)
        specs.append(TensorSpec(name + leaf.suffix, leaf.dtype, held, leaf.stride(tile)))
    return specs


def write_state(
    stream: TileStream, fmt: StateFormat, name: str, number: int, total: int, tile: int, state: TileState
) -> None:
    """Writes tile ``number`` of a parameter of ``total`` elements, cut by ``tile``, and its state."""
    stream.write(name, number * tile, state.param)
    for leaf in fmt.leaves:
        values = state.leaves[leaf.suffix]
        first, n = leaf.span(number, total, tile)
        if values.size < n:
            values = np.concatenate([values, np.zeros(n - values.size, values.dtype)])
        stream.write(name + leaf.suffix, first, values)
