# SPDX-License-Identifier: Apache-2.0
"""A leaf's update rewritten for a piece of the flattened leaf, where it is elementwise.

Only primitives that treat each element by itself may touch what has the leaf's shape; numbers that all elements share
are computed as they were. So a piece gets the bits that the whole leaf would get. Anything else, a mean or a transpose,
makes the leaf a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from memascend_jax.optim.offload_program import SPREAD, Program, Ref, Step

_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
        "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "convert_element_type", "copy", "copy_p", "cos", "cosh",
        "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
        "neg", "nextafter", "not", "optimization_barrier", "or", "population_count", "pow", "reduce_precision",
        "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
        "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip


def tiled(program: Program, pieces: frozenset[int], shape: tuple[int, ...]) -> Program | None:
    """Returns ``program`` for pieces of a leaf of ``shape``, or None when it is not elementwise.

    Args:
        pieces: the numbers of the inputs that have the leaf's shape and will be given piece by piece. The outputs that
            have it become pieces too.
    """
    used = program.used_inputs()
    if any(program.avals[number].shape != shape for number in used & pieces):
        return None
    # A shared array of that shape could not be told from a piece.
    if any(program.avals[number].shape == shape for number in used - pieces):
        return None
    rewriter = _Rewriter(shape)
    found = rewriter.rewrite(program, pieces)
    return None if found is None else found[0]


class _Rewriter:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def rewrite(self, program: Program, pieces: frozenset[int]) -> tuple[Program, list[bool]] | None:
        """Returns the rewritten program and which outputs are pieces."""
        full = set(pieces)
        same: dict[int, Ref] = {}
        steps: list[Step] = []
        for step in program.steps:
            step = replace(step, inputs=tuple(_follow(same, ref) for ref in step.inputs))
            whole = [isinstance(ref, int) and ref in full for ref in step.inputs]
            shapes = [program.avals[number].shape for number in step.outputs]
            if step.branches:
                done = self._branches(step, whole)
                if done is None:
                    return None
                steps.append(done[0])
                full.update(number for number, piece in zip(step.outputs, done[1], strict=True) if piece)
            elif not any(whole):
                made = self._shared(step, program, shapes)
                if made is None:
                    return None
                steps.append(made)
                if made.primitive is SPREAD:
                    full.update(step.outputs)
            elif self._changes_nothing(step, program):
                same[step.outputs[0]] = step.inputs[0]
            elif self._by_element(step, whole, program, shapes):
                steps.append(step)
                full.update(step.outputs)
            else:
                return None
        outputs = tuple(_follow(same, ref) for ref in program.outputs)
        whole_outputs = [isinstance(ref, int) and ref in full for ref in outputs]
        rewritten = replace(program, steps=tuple(steps), outputs=outputs)
        wrong = any(
            not piece and isinstance(ref, int) and program.avals[ref].shape == self._shape
            for ref, piece in zip(outputs, whole_outputs, strict=True)
        )
        return None if wrong else (rewritten, whole_outputs)

    def _branches(self, step: Step, whole: Sequence[bool]) -> tuple[Step, list[bool]] | None:
        first = len(step.choosing)
        if any(whole[:first]):
            return None
        pieces = frozenset(position for position, piece in enumerate(whole[first:]) if piece)
        found = [self.rewrite(branch, pieces) for branch in step.branches]
        kinds = [entry[1] for entry in found if entry is not None]
        if len(kinds) < len(found) or any(kind != kinds[0] for kind in kinds):
            return None
        return replace(step, branches=tuple(entry[0] for entry in found if entry is not None)), kinds[0]

    def _shared(self, step: Step, program: Program, shapes: Sequence[tuple[int, ...]]) -> Step | None:
        """A step without pieces: a number for all elements, or one that is spread over them."""
        if self._shape not in shapes:
            return step
        single = step.inputs[0] if len(step.inputs) == 1 else None
        if step.primitive.name != "broadcast_in_dim" or _shape_of(single, program) != ():
            return None
        return replace(step, primitive=SPREAD, params={})

    def _changes_nothing(self, step: Step, program: Program) -> bool:
        return (
            step.primitive.name in ("broadcast_in_dim", "reshape")
            and len(step.inputs) == 1
            and program.avals[step.outputs[0]].shape == self._shape
            and step.params.get("dimensions") is None
        )

    def _by_element(
        self, step: Step, whole: Sequence[bool], program: Program, shapes: Sequence[tuple[int, ...]]
    ) -> bool:
        operands = zip(step.inputs, whole, strict=True)
        return (
            step.primitive.name in _ELEMENTWISE
            and all(shape == self._shape for shape in shapes)
            and all(piece or _shape_of(ref, program) == () for ref, piece in operands)
        )


def _follow(same: dict[int, Ref], ref: Ref) -> Ref:
    return same.get(ref, ref) if isinstance(ref, int) else ref


def _shape_of(ref: Ref, program: Program) -> tuple[int, ...] | None:
    if isinstance(ref, int):
        found: tuple[int, ...] = program.avals[ref].shape
        return found
    return None if ref is None else tuple(jax.numpy.shape(ref.value))
