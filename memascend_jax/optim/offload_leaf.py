# SPDX-License-Identifier: Apache-2.0
"""What one leaf's update needs and gives, and the compiled function for it, shared by all leaves that are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.optim.offload_coupling import is_constant_zero
from memascend_jax.optim.offload_program import Constant, Program, Ref
from memascend_jax.optim.offload_tiling import tiled
from memascend_jax.optim.offload_trace import TracedTransform


@dataclass(frozen=True, slots=True, eq=False)
class LeafUpdate:
    """How one leaf is updated.

    Attributes:
        leaf: its index.
        frozen: its update is always zero: it has no state, and nothing is computed.
        elementwise: ``program`` takes flat pieces of it; else it takes the leaf in its true shape.
        program: outputs the update, then the new values of ``returned``.
        inputs: the program's inputs in the order in which they are given.
        states: the state arrays that belong to the leaf; ``changed`` are those that an update changes.
        returned: ``changed``, and for a whole leaf what all leaves share, so that XLA compiles what it would for optax
            on this leaf alone: which results a program has decides how it sums.
        update_dtype: of the update.
    """

    leaf: int
    frozen: bool
    elementwise: bool
    program: Program
    inputs: tuple[int, ...]
    states: tuple[int, ...]
    changed: tuple[int, ...]
    returned: tuple[int, ...]
    update_dtype: np.dtype[Any]


def leaf_updates(traced: TracedTransform, owners: Sequence[int | None]) -> list[LeafUpdate]:
    """Returns how each leaf is updated, in the order of the pytree."""
    owned: list[list[int]] = [[] for _ in traced.leaf_paths]
    for state, owner in enumerate(owners):
        if owner is not None:
            owned[owner].append(state)
    shared = [state for state, owner in enumerate(owners) if owner is None]
    return [_leaf_update(traced, leaf, owned[leaf], shared) for leaf in range(traced.n_leaves)]


def _leaf_update(
    traced: TracedTransform, leaf: int, states: Sequence[int], shared: Sequence[int]
) -> LeafUpdate:
    update, shape = traced.update, traced.leaf_shapes[leaf]
    aval = _aval(update, update.outputs[leaf], shape)
    if is_constant_zero(update, leaf):
        return LeafUpdate(leaf, True, True, update.sliced([leaf]), (), (), (), (), aval)
    changed = [
        state for state in states if update.outputs[traced.state_output(state)] != traced.state_input(state)
    ]
    program = update.sliced([leaf, *(traced.state_output(state) for state in changed)])
    pieces = frozenset(
        (
            traced.grad_input(leaf),
            traced.param_input(leaf),
            *(traced.state_input(state) for state in states),
        )
    )
    alike = all(
        traced.state_shapes[state].shape == shape.shape for state in states if is_streamed(traced, state)
    )
    rewritten = tiled(program, pieces, shape.shape) if alike and math.prod(shape.shape) > 1 else None
    returned = changed
    if rewritten is not None:
        program = rewritten
    else:
        returned = sorted([*changed, *shared])
        program = update.sliced([leaf, *(traced.state_output(state) for state in returned)])
    used = program.used_inputs()
    return LeafUpdate(
        leaf,
        frozen=False,
        elementwise=rewritten is not None,
        program=program,
        inputs=tuple(sorted(used)),
        states=tuple(states),
        changed=tuple(changed),
        returned=tuple(returned),
        update_dtype=aval,
    )


def is_streamed(traced: TracedTransform, state: int) -> bool:
    """Returns whether an array that belongs to a leaf lives in the store; single numbers stay in the handle."""
    elements: int = math.prod(traced.state_shapes[state].shape)
    return elements > 1


def _aval(program: Program, ref: Ref, default: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(program.avals[ref].dtype if isinstance(ref, int) else default.dtype)
    return found


class CompiledUpdates:
    """The compiled functions of leaves; leaves of the same structure share one, whatever their shapes."""

    def __init__(self) -> None:
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._of_leaf: dict[tuple[int, bool, bool], Callable[..., Any]] = {}

    def function(
        self, update: LeafUpdate, grad_input: int, param_input: int, *, clips: bool, applies: bool
    ) -> Any:
        """Returns the compiled function of a leaf: ``(inputs, clip, param) -> (result, new states)``.

        Args:
            grad_input, param_input: the numbers of the leaf's gradient and parameter among the program's inputs.
            clips: ``clip`` is (norm, max_norm) and the gradient is scaled as ``optax.clip_by_global_norm`` does.
            applies: the result is the new parameter; else it is the update.
        """
        of_leaf = update.leaf, clips, applies
        if of_leaf not in self._of_leaf:
            roles = tuple((number == grad_input, number == param_input) for number in update.inputs)
            key = (structure(update.program, update.inputs), update.elementwise, roles, clips, applies)
            if key not in self._functions:
                self._functions[key] = _compiled(update, grad_input, clips=clips, applies=applies)
            self._of_leaf[of_leaf] = self._functions[key]
        return self._of_leaf[of_leaf]


def _compiled(update: LeafUpdate, grad_input: int, *, clips: bool, applies: bool) -> Callable[..., Any]:
    program, inputs, elementwise = update.program, update.inputs, update.elementwise

    def run(values: Sequence[Any], clip: Any, param: Any, length: int) -> Any:
        given: list[Any] = [None] * program.n_inputs
        for number, value in zip(inputs, values, strict=True):
            if clips and number == grad_input:
                norm, max_norm = clip
                # Both in the gradient's own type, as optax's clip does, whose max_norm is a Python number.
                shorter = (value / norm.astype(value.dtype)) * max_norm.astype(value.dtype)
                value = jnp.where(norm < max_norm, value, shorter)
            given[number] = value
        result, *states = program.evaluate(given, length if elementwise else 0)
        if applies:
            # As optax.apply_updates does.
            result = (param + result).astype(param.dtype)
        return result, states

    return jax.jit(run, static_argnums=3)


def structure(program: Program, inputs: Sequence[int]) -> Any:
    """Returns what two programs have in common when they compute the same of inputs in this order, shapes aside."""
    numbers: dict[int, int] = {number: index for index, number in enumerate(inputs)}

    def ref_key(ref: Ref) -> Any:
        if isinstance(ref, int):
            return numbers.setdefault(ref, len(numbers))
        if isinstance(ref, Constant):
            return _constant_key(ref.value)
        return None

    steps = []
    for step in program.steps:
        operands = tuple(ref_key(ref) for ref in step.inputs)
        branches = tuple(structure(branch, range(branch.n_inputs)) for branch in step.branches)
        params = () if branches else tuple(sorted((name, str(value)) for name, value in step.params.items()))
        results = tuple((ref_key(number), str(program.avals[number].dtype)) for number in step.outputs)
        steps.append((step.primitive.name, operands, results, params, branches))
    return tuple(steps), tuple(ref_key(ref) for ref in program.outputs)


def _constant_key(value: Any) -> Any:
    array = np.asarray(value)
    return ("constant", str(array.dtype), array.shape, array.tobytes())
