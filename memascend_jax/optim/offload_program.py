# SPDX-License-Identifier: Apache-2.0
"""A transform's update as a list of primitive steps: what depends on what, and the part that some outputs need.

A ``Program`` is a jaxpr in which each leaf of a pytree can be followed, also through branches and calls, and run by
itself. Nested jits stay nested: XLA sums otherwise in a function of its own, and the bits are to be those of optax.
What does not live here: which leaf owns what (``offload_coupling``), and pieces of a leaf (``offload_tiling``).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core

#: Primitives that only call the jaxpr that they carry.
_CALLS = frozenset(
    {
        "closed_call", "core_call", "checkpoint", "remat", "remat2",
        "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
    }
)  # fmt: skip
_JITS = frozenset({"jit", "pjit"})
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value that is known when the program is built."""

    value: Any


#: A value's number, a constant, or None for an operand that a slice of a branch does not use.
Ref = int | Constant | None


class Spread:
    """Stands for a primitive: fills a piece of a leaf with one number."""

    name = "spread"
    multiple_results = False


SPREAD = Spread()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One primitive. ``branches`` are those of a ``cond``, whose first input says which one is taken, or the body of a
    nested jit."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    traceback: Any
    branches: tuple[Program, ...] = ()

    @property
    def choosing(self) -> tuple[Ref, ...]:
        """The input that says which branch is taken; nothing for a nested jit."""
        return () if self.primitive.name in _JITS else self.inputs[:1]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The inputs of the branches."""
        return self.inputs[len(self.choosing) :]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Steps in order over numbered values; the first ``n_inputs`` are the inputs.

    Attributes:
        avals: shape and dtype of each value, by number.
        producer: the index in ``all_steps`` of what makes each value, -1 for inputs.
        all_steps: the steps of the whole program that this one is a part of.
    """

    n_inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]
    avals: Sequence[Any]
    producer: Sequence[int] = field(repr=False)
    all_steps: Sequence[Step] = field(repr=False)

    def dependencies(self, inputs: Sequence[int]) -> list[int]:
        """Returns a set of bits for each output: the union of the bits that ``inputs`` carry and it depends on."""
        masks = self._masks(inputs)
        return [_bits(masks, ref) for ref in self.outputs]

    def merges(self, inputs: Sequence[int]) -> Iterator[Step]:
        """Yields the steps, inner ones first, whose result depends on more of the bits than any of its operands."""
        masks = self._masks(inputs)
        for step in self.steps:
            operands = [_bits(masks, ref) for ref in step.inputs]
            for branch in step.branches:
                yield from branch.merges(operands[len(step.choosing) :])
            result = functools.reduce(int.__or__, (masks[number] for number in step.outputs), 0)
            if result.bit_count() > 1 and result not in operands:
                yield step

    def sliced(self, positions: Sequence[int]) -> Program:
        """Returns the program of the outputs at ``positions`` alone."""
        outputs = tuple(self.outputs[position] for position in positions)
        needed = {ref for ref in outputs if isinstance(ref, int)}
        queue = [-self.producer[number] for number in needed if self.producer[number] >= 0]
        heapq.heapify(queue)
        steps: list[Step] = []
        last = None
        while queue:
            index = -heapq.heappop(queue)
            if index == last:
                continue
            last = index
            step = _needed_part(self.all_steps[index], needed)
            steps.append(step)
            for ref in step.inputs:
                if isinstance(ref, int) and ref not in needed:
                    needed.add(ref)
                    if self.producer[ref] >= 0:
                        heapq.heappush(queue, -self.producer[ref])
        return replace(self, steps=tuple(reversed(steps)), outputs=outputs)

    def used_inputs(self) -> set[int]:
        """Returns the numbers of the inputs that a step or an output reads."""
        read = {ref for step in self.steps for ref in step.inputs if isinstance(ref, int)}
        read |= {ref for ref in self.outputs if isinstance(ref, int)}
        return {number for number in read if number < self.n_inputs}

    def evaluate(self, inputs: Sequence[Any], piece_elements: int = 0) -> list[Any]:
        """Returns the outputs for ``inputs``, of which those that are not used may be None.

        Args:
            piece_elements: the length of the pieces that a program rewritten for pieces is given.
        """
        values = dict(enumerate(inputs))
        for step in self.steps:
            operands = [_value(values, ref) for ref in step.inputs]
            if step.branches:
                branches = [
                    functools.partial(branch.evaluate, piece_elements=piece_elements)
                    for branch in step.branches
                ]
                if step.choosing:
                    results = jax.lax.switch(operands[0], branches, operands[1:])
                else:
                    results = jax.jit(branches[0])(operands)
            elif step.primitive is SPREAD:
                results = [jax.lax.broadcast(operands[0], (piece_elements,))]
            else:
                # Other calls are inlined, so that the parameters of what is left are those of bind.
                results = step.primitive.bind(*operands, **step.params)
                if not step.primitive.multiple_results:
                    results = [results]
            values.update(zip(step.outputs, results, strict=True))
        return [_value(values, ref) for ref in self.outputs]

    def _masks(self, inputs: Sequence[int]) -> list[int]:
        masks = list(inputs) + [0] * (len(self.avals) - self.n_inputs)
        for step in self.steps:
            operands = [_bits(masks, ref) for ref in step.inputs]
            if step.branches:
                first = len(step.choosing)
                results = [branch.dependencies(operands[first:]) for branch in step.branches]
                for number, *found in zip(step.outputs, *results, strict=True):
                    masks[number] = functools.reduce(int.__or__, [*found, *operands[:first]], 0)
            else:
                # A loop is taken as a whole: each of its results depends on all that goes in.
                union = functools.reduce(int.__or__, operands, 0)
                for number in step.outputs:
                    masks[number] = union
        return masks


def flatten(closed: Any) -> Program:
    """Returns the program of a closed jaxpr."""
    jaxpr = closed.jaxpr
    avals = [var.aval for var in jaxpr.invars]
    steps: list[Step] = []
    producer = [-1] * len(avals)

    def number_of(aval: Any) -> int:
        avals.append(aval)
        producer.append(len(steps))
        return len(avals) - 1

    def walk(inner: Any, constants: Sequence[Any], operands: Sequence[Ref]) -> list[Ref]:
        known: dict[Any, Ref] = dict(zip(inner.invars, operands, strict=True))
        known.update(zip(inner.constvars, map(Constant, constants), strict=True))

        def ref(var: Any) -> Ref:
            return Constant(var.val) if isinstance(var, core.Literal) else known[var]

        for eqn in inner.eqns:
            inputs = tuple(ref(var) for var in eqn.invars)
            called = _called(eqn)
            if called is not None:
                body = called.jaxpr if hasattr(called, "consts") else called
                known.update(zip(eqn.outvars, walk(body, getattr(called, "consts", ()), inputs), strict=True))
                continue
            outputs = tuple(number_of(var.aval) for var in eqn.outvars)
            known.update(zip(eqn.outvars, outputs, strict=True))
            branches: tuple[Program, ...] = ()
            if eqn.primitive.name == "cond":
                branches = tuple(map(flatten, eqn.params["branches"]))
            elif eqn.primitive.name in _JITS:
                branches = (flatten(eqn.params["jaxpr"]),)
            steps.append(
                Step(eqn.primitive, eqn.params, inputs, outputs, eqn.source_info.traceback, branches)
            )
        return [ref(var) for var in inner.outvars]

    outputs = walk(jaxpr, closed.consts, range(len(avals)))
    return Program(len(jaxpr.invars), tuple(steps), tuple(outputs), avals, producer, steps)


def _called(eqn: Any) -> Any:
    if eqn.primitive.name not in _CALLS:
        return None
    found = next((eqn.params[name] for name in _CALLED if name in eqn.params), None)
    body = getattr(found, "jaxpr", found)
    return found if body is not None and len(body.invars) == len(eqn.invars) else None


def _needed_part(step: Step, needed: set[int]) -> Step:
    """Of branches only the needed results are computed, or the whole tree would hang on each of its leaves."""
    if not step.branches:
        return step
    positions = [position for position, number in enumerate(step.outputs) if number in needed]
    branches = tuple(branch.sliced(positions) for branch in step.branches)
    used = set[int]().union(*(branch.used_inputs() for branch in branches))
    operands = [ref if position in used else None for position, ref in enumerate(step.operands)]
    outputs = tuple(step.outputs[position] for position in positions)
    return replace(step, inputs=(*step.choosing, *operands), outputs=outputs, branches=branches)


def _bits(masks: Sequence[int], ref: Ref) -> int:
    return masks[ref] if isinstance(ref, int) else 0


def _value(values: dict[int, Any], ref: Ref) -> Any:
    return values[ref] if isinstance(ref, int) else ref.value if isinstance(ref, Constant) else None
