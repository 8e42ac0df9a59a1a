# SPDX-License-Identifier: Apache-2.0
"""Between a placement's update groups and the arrays of a checkpoint, in the same state format or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.array_files import ArrayReader
from memascend_jax.checkpoints.array_layout import PARAMS, group_of
from memascend_jax.checkpoints.saved_step import SavedStep, check_model
from memascend_jax.dtypes import to_dtype
from memascend_jax.optim.format_conversion import Rounding, TileState, convert_tile
from memascend_jax.optim.state_format import Leaf
from memascend_jax.training.model_layout import PARAMETER, ModelLayout, UpdatePiece
from memascend_jax.training.placement import LoadedGroup, Placement

#: ``write(group, tensor, start, values)``: starts writing; the values stay as they are until the futures are done.
Write = Callable[[str, str, int, NDArray[Any]], Sequence[Future[None]]]
#: Reads at a time; the disk is busy with as many.
_READERS = 4


def stream_state(layout: ModelLayout, placement: Placement, write: Write) -> None:
    """Gives every array of the state to ``write``, in pieces, each array in order."""

    def visit(loaded: LoadedGroup) -> Sequence[Future[None]]:
        futures: list[Future[None]] = []
        for piece in loaded.group.pieces:
            futures += write(PARAMS, piece.tensor, piece.start, loaded.view(piece, PARAMETER))
            for leaf in layout.format.leaves:
                start, n = _leaf_range(leaf, piece)
                values = loaded.view(piece, leaf.suffix)[:n]
                futures += write(group_of(leaf.suffix), piece.tensor, start, values)
        return futures

    placement.visit_groups(visit)


def restore_state(
    layout: ModelLayout,
    placement: Placement,
    saved: SavedStep,
    *,
    seed: int,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Makes the state that of the checkpoint, its checksums compared; the caller commits.

    Between state formats what the target has fewer bits for is rounded as ``optim.format_conversion`` says.

    Args:
        seed: of stochastic rounding.
        on_tensor: called after each tensor, for progress.

    Raises:
        DataError: it is of another model, not whole, or damaged.
    """
    check_model(saved, layout.tensors)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="memascend-restore") as executor:
        fill: _SameFormat | _OtherFormat
        if saved.format == layout.format:
            fill = _SameFormat(layout, saved, executor, on_tensor)
        else:
            fill = _OtherFormat(layout, saved, seed, on_tensor)
        placement.fill_groups(fill)


class _Arrays:
    """The arrays of a step being read."""

    def __init__(self, layout: ModelLayout, saved: SavedStep, on_tensor: Callable[[str], None]) -> None:
        self._readers = {key: saved.reader(*key) for key in saved.arrays}
        self._elements = {tensor.name: tensor.elements for tensor in layout.tensors}
        self._on_tensor = on_tensor

    def reader(self, leaf: Leaf | None, tensor: str) -> ArrayReader:
        return self._readers[PARAMS if leaf is None else group_of(leaf.suffix), tensor]

    def passed(self, piece: UpdatePiece) -> None:
        if piece.start + piece.n_elements == self._elements[piece.tensor]:
            self._on_tensor(piece.tensor)


class _SameFormat(_Arrays):
    """Reads arrays to where they belong."""

    def __init__(
        self, layout: ModelLayout, saved: SavedStep, executor: Executor, on_tensor: Callable[[str], None]
    ) -> None:
        super().__init__(layout, saved, on_tensor)
        self._leaves: list[Leaf | None] = [None, *layout.format.leaves]
        self._executor = executor

    def begin(self, loaded: LoadedGroup) -> Sequence[Future[None]]:
        return [
            self._executor.submit(self.reader(leaf, piece.tensor).read, *_place(loaded, piece, leaf))
            for piece in loaded.group.pieces
            for leaf in self._leaves
        ]

    def finish(self, loaded: LoadedGroup) -> None:
        for piece in loaded.group.pieces:
            for leaf in self._leaves:
                start, values = _place(loaded, piece, leaf)
                self.reader(leaf, piece.tensor).check(start, values)
                if leaf is not None:
                    # The padding of a tile of scales.
                    loaded.view(piece, leaf.suffix)[values.size :] = 0
            self.passed(piece)


class _OtherFormat(_Arrays):
    """Reads arrays into memory of their own, one tile at a time, and puts what they become where it belongs."""

    def __init__(
        self, layout: ModelLayout, saved: SavedStep, seed: int, on_tensor: Callable[[str], None]
    ) -> None:
        super().__init__(layout, saved, on_tensor)
        self._source, self._target = saved.format, layout.format
        self._seed, self._step = seed, saved.record.step

    def begin(self, loaded: LoadedGroup) -> Sequence[Future[None]]:
        return []

    def finish(self, loaded: LoadedGroup) -> None:
        for piece in loaded.group.pieces:
            draws = Rounding(self._seed, self._step, piece.tensor, piece.start)
            made = convert_tile(self._source, self._target, self._read(piece), draws)
            loaded.view(piece, PARAMETER)[:] = made.param
            for leaf in self._target.leaves:
                view, values = loaded.view(piece, leaf.suffix), made.leaves[leaf.suffix]
                view[: values.size] = values
                view[values.size :] = 0
            self.passed(piece)

    def _read(self, piece: UpdatePiece) -> TileState:
        leaves = {leaf.suffix: self._read_leaf(leaf, piece) for leaf in self._source.leaves}
        return TileState(self._read_leaf(None, piece), leaves)

    def _read_leaf(self, leaf: Leaf | None, piece: UpdatePiece) -> NDArray[Any]:
        start, n = (piece.start, piece.n_elements) if leaf is None else _leaf_range(leaf, piece)
        reader = self.reader(leaf, piece.tensor)
        values = np.empty(n, to_dtype(reader.layout.dtype))
        reader.read(start, values)
        reader.check(start, values)
        return values


def _place(loaded: LoadedGroup, piece: UpdatePiece, leaf: Leaf | None) -> tuple[int, NDArray[Any]]:
    """The first element of a leaf of ``piece`` in its array, and its memory without padding."""
    if leaf is None:
        return piece.start, loaded.view(piece, PARAMETER)
    start, n = _leaf_range(leaf, piece)
    return start, loaded.view(piece, leaf.suffix)[:n]


def _leaf_range(leaf: Leaf, piece: UpdatePiece) -> tuple[int, int]:
    """First value and values of ``piece`` in the leaf's array, where tiles have no padding."""
    return piece.start // leaf.per * leaf.width, leaf.values(piece.n_elements)
