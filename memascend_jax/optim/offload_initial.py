# SPDX-License-Identifier: Apache-2.0
"""The first state of an offloaded transform: its arrays written tile by tile, its numbers returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from memascend_jax.memory.pool import Lease
from memascend_jax.optim.offload_arrays import copy_values, source_of
from memascend_jax.optim.offload_handle import as_number
from memascend_jax.optim.offload_layout import PARAMETER, Piece, Region
from memascend_jax.optim.offload_tiling import tiled

if TYPE_CHECKING:
    from memascend_jax.optim.offload_engine import OffloadEngine


def write_initial_state(engine: OffloadEngine, params: Sequence[Any]) -> dict[int, np.ndarray]:
    """Writes what the transform's ``init`` gives for ``params`` and returns the handle's numbers by state array."""
    writer = _InitialState(engine, params)
    with jax.default_device(engine.cpu):
        engine.stream.run(writer.write, reads=False)
        return writer.numbers()


class _InitialState:
    def __init__(self, engine: OffloadEngine, params: Sequence[Any]) -> None:
        self._engine = engine
        self._params = params

    def write(self, piece: Piece, lease: Lease | None) -> None:
        """Fills the regions of one piece."""
        for region in piece.regions:
            if region.state != PARAMETER and lease is not None:
                values = self._values(piece, region)
                copy_values(values, lease.address + region.offset, values.nbytes)

    def numbers(self) -> dict[int, np.ndarray]:
        """Returns what stays in the handle."""
        traced = self._engine.traced
        found: dict[int, np.ndarray] = {}
        for state in self._engine.number_states():
            program = traced.init.sliced([state])
            given = [
                self._whole(leaf) if leaf in program.used_inputs() else None
                for leaf in range(traced.n_leaves)
            ]
            found[state] = as_number(program.evaluate(given)[0], traced.state_shapes[state].dtype)
        return found

    def _values(self, piece: Piece, region: Region) -> Any:
        traced, leaf = self._engine.traced, piece.leaf
        dtype = traced.state_shapes[region.state].dtype
        program = traced.init.sliced([region.state])
        uses = leaf in program.used_inputs()
        shape = traced.leaf_shapes[leaf].shape
        by_piece = None if piece.whole else tiled(program, frozenset((leaf,)), shape)
        given: list[Any] = [None] * traced.n_leaves
        if by_piece is None:
            given[leaf] = self._whole(leaf) if uses else None
            values = np.asarray(program.evaluate(given)[0]).reshape(-1)
            return np.ascontiguousarray(values[region.start : region.start + region.n_elements], dtype)
        given[leaf] = self._piece(piece) if uses else None
        return np.ascontiguousarray(np.asarray(by_piece.evaluate(given, piece.n_elements)[0]), dtype)

    def _whole(self, leaf: int) -> Any:
        param = self._params[leaf]
        return self._engine.store.get(param) if isinstance(param, str) else source_of(param).whole()

    def _piece(self, piece: Piece) -> Any:
        param = self._params[piece.leaf]
        if isinstance(param, str):
            return self._engine.store.read_elements(param, piece.start, piece.n_elements)
        return source_of(param).piece(piece.start, min(piece.n_elements, math.prod(np.shape(param))))
