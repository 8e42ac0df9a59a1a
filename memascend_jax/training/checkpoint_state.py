# SPDX-License-Identifier: Apache-2.0
"""Between a placement's update groups and the arrays of a checkpoint, in the same state format or another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.array_files import ArrayReader
from memascend_jax.checkpoints.array_layout import PARAMS, group_of
from memascend_jax.checkpoints.saved_step import SavedStep, check_model
from memascend_jax.dtypes import to_dtype
from memascend_jax.models.shapes import TensorShape
from memascend_jax.optim.format_conversion import (
    ExactState,
    Rounding,
    TileState,
    convert_tile,
    encode_tile,
    master_of,
)
from memascend_jax.optim.rounding import join_master, round_master, widen
from memascend_jax.optim.state_format import MASTER, RESIDUAL, Leaf
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
            for leaf in (None, *layout.format.leaves):
                start, values = _place(loaded, piece, leaf)
                futures += write(_group(leaf), piece.tensor, start, values)
        return futures

    placement.visit_groups(visit)
    for tensor, start, n in _frozen_pieces(layout):
        for future in write(PARAMS, tensor.name, start, placement.read(tensor.name, start, n)):
            future.result()


def restore_state(
    layout: ModelLayout,
    placement: Placement,
    saved: SavedStep,
    *,
    seed: int,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> None:
    """Makes the state that of the checkpoint, its checksums compared; the caller commits.

    Between state formats what the target has fewer bits for is rounded as ``optim.format_conversion`` says. What was
    frozen and is trained now begins without moments.

    Args:
        seed: of stochastic rounding.
        on_tensor: called after each tensor, for progress.

    Raises:
        DataError: it is of another model, not whole, or damaged.
    """
    check_model(saved, layout.tensors)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="memascend-restore") as executor:
        restoring = _Restoring(layout, saved, executor, seed, on_tensor)
        placement.fill_groups(restoring)
    for tensor, start, n in _frozen_pieces(layout):
        placement.write(tensor.name, start, restoring.parameters(tensor.name, start, n))
        if start + n == tensor.elements:
            on_tensor(tensor.name)


def read_masters(
    layout: ModelLayout, placement: Placement, tensor: str, start: int, n: int
) -> NDArray[np.float32]:
    """Returns elements of a tensor as exactly as they are known: its fp32 masters; of a frozen one the parameters."""
    leaves = {
        leaf.suffix: placement.read(tensor + leaf.suffix, start, n)
        for leaf in layout.leaves_of(tensor)
        if leaf.suffix in (MASTER, RESIDUAL)
    }
    if MASTER in leaves:
        return widen(leaves[MASTER])
    return join_master(layout.format, placement.read(tensor, start, n), leaves.get(RESIDUAL))


class _Restoring:
    """Reads arrays to where they belong, or converts them on the way there, one tile at a time."""

    def __init__(
        self,
        layout: ModelLayout,
        saved: SavedStep,
        executor: Executor,
        seed: int,
        on_tensor: Callable[[str], None],
    ) -> None:
        self._source, self._target = saved.format, layout.format
        self._had_no_state = frozenset(saved.record.frozen)
        self._readers = {key: saved.reader(*key) for key in saved.arrays}
        self._elements = {tensor.name: tensor.elements for tensor in layout.tensors}
        self._executor = executor
        self._seed, self._step = seed, saved.record.step
        self._on_tensor = on_tensor

    def begin(self, loaded: LoadedGroup) -> Sequence[Future[None]]:
        return [
            self._executor.submit(self._reader(leaf, piece.tensor).read, *_place(loaded, piece, leaf))
            for piece in loaded.group.pieces
            if self._stays(piece.tensor)
            for leaf in (None, *self._target.leaves)
        ]

    def finish(self, loaded: LoadedGroup) -> None:
        for piece in loaded.group.pieces:
            if self._stays(piece.tensor):
                self._check(loaded, piece)
            else:
                self._convert(loaded, piece)
            for leaf in self._target.leaves:
                # The padding of a tile of scales.
                loaded.view(piece, leaf.suffix)[leaf.values(piece.n_elements) :] = 0
            if piece.start + piece.n_elements == self._elements[piece.tensor]:
                self._on_tensor(piece.tensor)

    def parameters(self, tensor: str, start: int, n: int) -> NDArray[Any]:
        """Returns parameters of a tensor that is not trained."""
        if self._source.param_dtype == self._target.param_dtype:
            return self._read(None, tensor, start, n)
        state = TileState(
            self._read(None, tensor, start, n), self._leaves(tensor, start, n, (MASTER, RESIDUAL))
        )
        return round_master(master_of(self._source, state), self._target.param_dtype)

    def _stays(self, tensor: str) -> bool:
        return self._source == self._target and tensor not in self._had_no_state

    def _check(self, loaded: LoadedGroup, piece: UpdatePiece) -> None:
        for leaf in (None, *self._target.leaves):
            self._reader(leaf, piece.tensor).check(*_place(loaded, piece, leaf))

    def _convert(self, loaded: LoadedGroup, piece: UpdatePiece) -> None:
        tensor, start, n = piece.tensor, piece.start, piece.n_elements
        draws = Rounding(self._seed, self._step, tensor, start)
        param = self._read(None, tensor, start, n)
        if tensor in self._had_no_state:
            nothing = np.zeros(n, np.float32)
            made = encode_tile(self._target, ExactState(widen(param), nothing, nothing), draws)
        else:
            everything = tuple(leaf.suffix for leaf in self._source.leaves)
            state = TileState(param, self._leaves(tensor, start, n, everything))
            made = convert_tile(self._source, self._target, state, draws)
        loaded.view(piece, PARAMETER)[:] = made.param
        for leaf in self._target.leaves:
            values = made.leaves[leaf.suffix]
            loaded.view(piece, leaf.suffix)[: values.size] = values

    def _leaves(self, tensor: str, start: int, n: int, suffixes: Sequence[str]) -> dict[str, NDArray[Any]]:
        known = [] if tensor in self._had_no_state else self._source.leaves
        return {leaf.suffix: self._read(leaf, tensor, start, n) for leaf in known if leaf.suffix in suffixes}

    def _read(self, leaf: Leaf | None, tensor: str, start: int, n: int) -> NDArray[Any]:
        """Returns the values of elements ``[start, start + n)`` of the tensor, their checksums compared."""
        reader = self._reader(leaf, tensor)
        start, n = _leaf_range(leaf, start, n)
        values = np.empty(n, to_dtype(reader.layout.dtype))
        reader.read(start, values)
        reader.check(start, values)
        return values

    def _reader(self, leaf: Leaf | None, tensor: str) -> ArrayReader:
        return self._readers[_group(leaf), tensor]


def _place(loaded: LoadedGroup, piece: UpdatePiece, leaf: Leaf | None) -> tuple[int, NDArray[Any]]:
    """The first element of a leaf of ``piece`` in its array, and its memory without padding."""
    start, n = _leaf_range(leaf, piece.start, piece.n_elements)
    return start, loaded.view(piece, PARAMETER if leaf is None else leaf.suffix)[:n]


def _leaf_range(leaf: Leaf | None, start: int, n: int) -> tuple[int, int]:
    """First value and values, in the array of ``leaf``, of ``n`` elements from ``start``: arrays have no padding."""
    return (start, n) if leaf is None else (start // leaf.per * leaf.width, leaf.values(n))


def _group(leaf: Leaf | None) -> str:
    return PARAMS if leaf is None else group_of(leaf.suffix)


def _frozen_pieces(layout: ModelLayout) -> Iterator[tuple[TensorShape, int, int]]:
    """Yields the tiles of what is not trained: tensor, first element, elements."""
    for tensor in layout.tensors:
        if not layout.is_trained(tensor.name):
            size = layout.tile_elements[tensor.name]
            for start in range(0, tensor.elements, size):
                yield tensor, start, min(size, tensor.elements - start)
