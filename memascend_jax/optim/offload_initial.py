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
                self._fill(piece, region, lease)

    def numbers(self) -> dict[int, np.ndarray]:
        """Returns what stays in the handle."""
        traced = self._engine.traced
        found: dict[int, np.ndarray] = {}
        for state in self._engine.handles.number_states():
            program = traced.init.sliced([state])
            given = [
                self._whole(leaf) if leaf in program.used_inputs() else None
                for leaf in range(traced.n_leaves)
            ]
            found[state] = as_number(program.evaluate(given)[0], traced.state_shapes[state].dtype)
        return found

    def _fill(self, piece: Piece, region: Region, lease: Lease) -> None:
        traced, leaf = self._engine.traced, piece.leaf
        dtype = traced.state_shapes[region.state].dtype
        program = traced.init.sliced([region.state])
        uses = leaf in program.used_inputs()
        by_piece = None if piece.whole else tiled(program, frozenset((leaf,)), traced.leaf_shapes[leaf].shape)
        given: list[Any] = [None] * traced.n_leaves
        if by_piece is None:
            given[leaf] = self._whole(leaf) if uses else None
            whole = np.asarray(program.evaluate(given)[0]).reshape(-1)
            values = whole[region.start : region.start + region.n_elements]
        elif uses:
            given[leaf] = self._piece(piece)
            values = np.asarray(by_piece.evaluate(given, piece.n_elements)[0])
        else:
            # All elements are the same one. A tile of them would stay with the heap when it is freed.
            values = np.asarray(by_piece.evaluate(given, 1)[0])
            lease.view(np.dtype(dtype), (region.n_elements,), region.offset)[:] = values
            return
        contiguous = np.ascontiguousarray(values, dtype)
        copy_values(contiguous, lease.address + region.offset, contiguous.nbytes)

    def _whole(self, leaf: int) -> Any:
        param = self._params[leaf]
        return self._engine.store.get(param) if isinstance(param, str) else source_of(param).whole()

    def _piece(self, piece: Piece) -> Any:
        param = self._params[piece.leaf]
        if isinstance(param, str):
            return self._engine.store.read_elements(param, piece.start, piece.n_elements)
        return source_of(param).piece(piece.start, min(piece.n_elements, math.prod(np.shape(param))))
