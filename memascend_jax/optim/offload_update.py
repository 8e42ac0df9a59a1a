# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one update: pieces in slots through a program or a kernel, into new updates or parameters.

What does not live here: what comes before and after, the checks and the commit (``offload_step``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import NonfiniteError
from memascend_jax.memory.pool import Lease
from memascend_jax.optim.fused import StepNumbers
from memascend_jax.optim.offload_arrays import (
    HostTarget,
    Source,
    copy_values,
    source_of,
    target_like,
    zeros_like,
)
from memascend_jax.optim.offload_engine import OffloadEngine
from memascend_jax.optim.offload_fused import takes_gradient, update_piece
from memascend_jax.optim.offload_gradients import is_finite
from memascend_jax.optim.offload_handle import as_number
from memascend_jax.optim.offload_layout import PARAMETER, Piece
from memascend_jax.optim.offload_leaf import LeafUpdate, is_streamed
from memascend_jax.transfer.cpu import CpuTransfer

_LARGEST_COUNT = (1 << 31) - 2


@dataclass(frozen=True, slots=True)
class Request:
    """What a step is given: leaves in the order of ``init``; ``params`` None: the transform does not need them."""

    grads: Sequence[Any]
    params: Sequence[Any] | None
    extra: Mapping[str, Any]
    applies: bool


class PieceUpdates:
    """One step under way."""

    def __init__(
        self,
        engine: OffloadEngine,
        request: Request,
        numbers: Mapping[int, np.ndarray],
        clip: tuple[np.float32, np.float32] | None,
    ) -> None:
        self._engine, self._request, self._clip = engine, request, clip
        self._numbers = numbers
        self._new = dict(numbers)
        self._transfer = CpuTransfer(engine.cpu)
        self._fused: StepNumbers | None = None
        self._targets: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._left = [0] * len(engine.updates)
        for group in engine.layout.groups:
            for piece in group.pieces:
                self._left[piece.leaf] += 1
        self._grad: tuple[int, Source | None] = (-1, None)
        self._param: tuple[int, Source | None] = (-1, None)

    def prepare(self) -> None:
        """Computes the numbers that all leaves share; nothing is written yet."""
        engine = self._engine
        shared = engine.handles.shared_states()
        given: list[Any] = [None] * engine.traced.update.n_inputs
        for state in shared:
            given[engine.traced.state_input(state)] = self._numbers[state]
        for index, name in enumerate(engine.traced.extra_names):
            given[engine.traced.extra_input(index)] = self._request.extra[name]
        values = engine.shared_update(given)
        for state, value in zip(shared, values, strict=True):
            self._new[state] = as_number(value, engine.traced.state_shapes[state].dtype)
        bad = [engine.traced.state_paths[state] for state in shared if _has_nan(self._new[state])]
        if bad and engine.options.nonfinite != "keep":
            raise NonfiniteError(
                f"'{bad[0]}' of the optimizer state is nan at update {engine.version + 1:,}, so a schedule or "
                "hyperparameter is; nothing was changed"
            )
        self._fused = self._fused_numbers()

    def piece(self, piece: Piece, lease: Lease | None) -> None:
        """Updates one piece: its state in the slot, its part of the result."""
        leaf = self._engine.fused.get(piece.leaf)
        if leaf is not None and takes_gradient(self._request.grads[piece.leaf].dtype):
            self._by_kernel(piece, lease)
        else:
            self._by_program(piece, lease)
        self._left[piece.leaf] -= 1
        if self._left[piece.leaf] == 0 and piece.leaf in self._targets:
            self._results[piece.leaf] = self._targets.pop(piece.leaf).finish()

    def finish(self) -> tuple[list[Any], dict[int, np.ndarray]]:
        """Returns the results of all leaves and the handle's new numbers."""
        results = []
        for update in self._engine.updates:
            leaf = update.leaf
            if leaf in self._results:
                results.append(self._results[leaf])
            elif self._request.applies:
                assert self._request.params is not None
                results.append(self._request.params[leaf])
            else:
                results.append(zero_update(self._engine, self._request, update))
        return results, self._new

    def _by_program(self, piece: Piece, lease: Lease | None) -> None:
        engine, update = self._engine, self._engine.updates[piece.leaf]
        traced = engine.traced
        grad, param = traced.grad_input(piece.leaf), traced.param_input(piece.leaf)
        function = engine.compiled.function(
            update, grad, param, clips=self._clip is not None, applies=self._request.applies
        )
        values = [self._value(number, piece, lease) for number in update.inputs]
        own = self._value(param, piece, lease) if self._request.applies else None
        result, states = function(values, self._clip, own, piece.n_elements)
        # Once the results are there all inputs have been read, and the slot may be written.
        jax.block_until_ready((result, states))  # type: ignore[no-untyped-call]
        self._check_finite(result, piece)
        for state, new in zip(update.returned, states, strict=True):
            if engine.owners[state] is None:
                continue
            region = piece.region(state)
            if region is None or lease is None:
                self._new[state] = np.asarray(new)
            else:
                copy_values(new, lease.address + region.offset, new.nbytes)
        self._put(piece, lease, result)

    def _by_kernel(self, piece: Piece, lease: Lease | None) -> None:
        assert self._fused is not None
        grad = self._grad_source(piece.leaf).piece(piece.start, piece.n_elements)
        region = piece.region(PARAMETER)
        in_place = self._request.applies and region is not None
        old = self._param_values(piece, lease)
        if in_place:
            new = old
        else:
            target = self._target(piece.leaf)
            direct = isinstance(target, HostTarget)
            new = (
                target.piece(piece.start, piece.n_elements)
                if direct
                else np.empty(piece.n_elements, np.float32)
            )
            new[:] = old
        update_piece(self._engine.fused[piece.leaf], self._fused, piece, lease, grad, new)
        if not self._request.applies:
            np.subtract(new, old, out=new)
        self._check_finite(new, piece)
        if not in_place and not direct:
            target.fill(piece.start, new)

    def _value(self, number: int, piece: Piece, lease: Lease | None) -> Any:
        """Returns an input of the piece's program; the state's arrays alias the slot."""
        engine, traced, leaf = self._engine, self._engine.traced, piece.leaf
        if number == traced.grad_input(leaf):
            source = self._grad_source(leaf)
            return source.whole() if piece.whole else source.piece(piece.start, piece.n_elements)
        if number == traced.param_input(leaf):
            region = piece.region(PARAMETER)
            shape = traced.leaf_shapes[leaf].shape if piece.whole else (piece.n_elements,)
            if region is not None and lease is not None:
                return self._transfer.to_device(lease, region.dtype, shape, region.offset)
            source = self._param_source(leaf)
            return source.whole() if piece.whole else source.piece(piece.start, piece.n_elements)
        state = number - traced.n_leaves
        if 0 <= state < len(traced.state_paths):
            if engine.owners[state] is None or not is_streamed(traced, state):
                return self._numbers[state]
            region = piece.region(state)
            assert region is not None and lease is not None
            shape = traced.state_shapes[state].shape if piece.whole else (piece.n_elements,)
            return self._transfer.to_device(lease, region.dtype, shape, region.offset)
        return self._request.extra[traced.extra_names[number - traced.extra_input(0)]]

    def _param_values(self, piece: Piece, lease: Lease | None) -> Any:
        region = piece.region(PARAMETER)
        if region is not None and lease is not None:
            return lease.view(to_dtype(region.dtype), (piece.n_elements,), region.offset)
        return self._param_source(piece.leaf).piece(piece.start, piece.n_elements)

    def _put(self, piece: Piece, lease: Lease | None, result: Any) -> None:
        region = piece.region(PARAMETER)
        if self._request.applies and region is not None and lease is not None:
            copy_values(result, lease.address + region.offset, result.nbytes)
        else:
            self._target(piece.leaf).fill(piece.start, result)

    def _target(self, leaf: int) -> Any:
        if leaf not in self._targets:
            shape = self._engine.traced.leaf_shapes[leaf]
            dtype = shape.dtype if self._request.applies else self._engine.updates[leaf].update_dtype
            self._targets[leaf] = target_like(_placed(self._request, leaf), shape.shape, dtype)
        return self._targets[leaf]

    def _grad_source(self, leaf: int) -> Source:
        known, source = self._grad
        if known != leaf or source is None:
            source = source_of(self._request.grads[leaf])
            self._grad = leaf, source
        return source

    def _param_source(self, leaf: int) -> Source:
        known, source = self._param
        if known != leaf or source is None:
            assert self._request.params is not None
            source = source_of(self._request.params[leaf])
            self._param = leaf, source
        return source

    def _check_finite(self, values: Any, piece: Piece) -> None:
        """Gradients were looked at before: what is not finite now comes from a number, or from the parameter."""
        if self._engine.options.nonfinite == "keep" or is_finite(found := np.asarray(values).reshape(-1)):
            return
        index = int(np.flatnonzero(~np.isfinite(found.astype(np.float64)))[0])
        name, at = self._engine.names[piece.leaf], f"update {self._engine.version + 1:,}"
        params = self._request.params
        given = None if params is None or isinstance(params[piece.leaf], str) else params[piece.leaf]
        if given is not None:
            old = float(self._param_source(piece.leaf).piece(piece.start, piece.n_elements)[index])
            if not math.isfinite(old):
                raise NonfiniteError(
                    f"the parameter '{name}' is {old} at its element {piece.start + index:,}, before {at}; "
                    'the update was not made. nonfinite="keep" lets such ones through as optax does'
                )
        raise NonfiniteError(
            f"the update of '{name}' gives {float(found[index])} at its element {piece.start + index:,}, {at}, though "
            "its gradient is finite: look at the learning rate's schedule and the other hyperparameters, and at "
            "the parameter itself. The update was undone"
        )

    def _fused_numbers(self) -> StepNumbers | None:
        """Returns the kernels' numbers for this step: its count is the one that the state has."""
        engine = self._engine
        if not engine.fused:
            return None
        counts = [
            int(self._numbers[state])
            for state in engine.handles.number_states()
            if engine.traced.state_paths[state].rpartition("/")[2] == "count"
        ]
        scale = 1.0
        if self._clip is not None and self._clip[0] >= self._clip[1]:
            scale = float(self._clip[1] / self._clip[0])
        fused = next(iter(engine.fused.values())).update
        try:
            # As optax's counts, which stay at the largest int32.
            count = min((counts[0] if counts else engine.version) + 1, _LARGEST_COUNT)
            return fused.numbers(count, scale)
        except ValueError as error:
            raise NonfiniteError(f"{error}; nothing was changed") from error


def zero_update(engine: OffloadEngine, request: Request, update: LeafUpdate) -> Any:
    """Returns the update of a leaf that does not change."""
    shape = engine.traced.leaf_shapes[update.leaf].shape
    return zeros_like(_placed(request, update.leaf), shape, update.update_dtype)


def _placed(request: Request, leaf: int) -> Any:
    """The array beside which a result belongs."""
    param = None if request.params is None else request.params[leaf]
    return request.grads[leaf] if param is None or isinstance(param, str) else param


def _has_nan(value: Any) -> bool:
    """Infinite ones may be right: the best loss so far begins so."""
    return jnp.issubdtype(value.dtype, jnp.floating) and bool(np.isnan(np.asarray(value, np.float64)).any())
