# SPDX-License-Identifier: Apache-2.0
"""Which leaf owns which array of a transform's state, and the refusal of transforms that couple leaves.

A leaf can be streamed by itself when its update and its state depend on no other leaf's gradient, parameter or state.
That is read off the jaxpr, so it is exact where a numeric probe would miss what happens on rare steps only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax

from memascend_jax.errors import ConfigError
from memascend_jax.optim.offload_program import Program, Step
from memascend_jax.optim.offload_trace import TracedTransform, shape_struct, trace_transform

#: Wrappers that couple nothing themselves, so that the transform inside them is named.
_WRAPPERS = frozenset(
    {
        "chain", "named_chain", "masked", "partition", "multi_transform", "inject_hyperparams", "flatten",
        "with_extra_args_support", "selective_transform", "inject_stateful_hyperparams",
    }
)  # fmt: skip
_UPDATE = re.compile(r"(update|init)(_fn)?$")
_REMEDIES = {
    "clip_by_global_norm": "leave it out and pass clip_norm= to offload, which clips by the same norm",
    "apply_if_finite": 'leave it out and pass nonfinite="skip" to offload',
    "skip_not_finite": 'leave it out of MultiSteps and pass nonfinite="skip" to offload',
}
_REMEDY = "use it with its state in memory, or leave it out"
#: A state array of more elements that one leaf alone reads belongs to that leaf.
_LARGE_ELEMENTS = 1024


class CouplingError(ConfigError):
    """A transform whose leaves cannot be updated one at a time. ``culprit`` is the name of what couples them."""

    def __init__(self, message: str, culprit: str) -> None:
        super().__init__(message)
        self.culprit = culprit


def check_separable(tx: Any, extra: Any = None) -> None:
    """Raises ``CouplingError`` when ``tx`` couples leaves of whatever pytree.

    A transform made for one pytree (masks and labels with its names) says nothing here; it is checked in ``init``.
    """
    probe = {name: shape_struct((4, 8), jax.numpy.float32) for name in ("first", "second")}
    try:
        traced = trace_transform(tx, probe, extra=extra)
    except Exception:
        return  # It does not fit the probe; the real parameters will tell.
    state_owners(traced)


def state_owners(traced: TracedTransform) -> list[int | None]:
    """Returns for each state array the leaf that it belongs to, or None for what all leaves share.

    Raises:
        CouplingError: a leaf's update, or an array of the state, depends on several leaves.
    """
    n, m = traced.n_leaves, len(traced.state_paths)
    bits = [1 << leaf for leaf in range(n)]
    states = [1 << (n + state) for state in range(m)]
    inputs = [*bits, *states, *bits, *([0] * len(traced.extra_names))]
    depends = traced.update.dependencies(inputs)
    begins = traced.init.dependencies(bits)
    leaves = (1 << n) - 1
    # Bits of leaves that each state array holds something of, sooner or later.
    held = [(depends[n + state] & leaves) | begins[state] for state in range(m)]
    changed = True
    while changed:
        changed = False
        for state in range(m):
            total = held[state] | _held_bits(depends[n + state] >> n, held)
            if total != held[state]:
                held[state], changed = total, True
    results = [
        (depends[leaf] & leaves) | (1 << leaf) | _held_bits(depends[leaf] >> n, held) for leaf in range(n)
    ]
    if any(mask.bit_count() > 1 for mask in (*results, *held)):
        raise _refusal(traced, results, held)
    owners = [mask.bit_length() - 1 if mask else None for mask in held]
    return _with_large_ones(traced, depends, owners)


def _held_bits(states: int, held: Sequence[int]) -> int:
    total = 0
    while states:
        lowest = states & -states
        total |= held[lowest.bit_length() - 1]
        states ^= lowest
    return total


def _with_large_ones(
    traced: TracedTransform, depends: Sequence[int], owners: list[int | None]
) -> list[int | None]:
    """Gives what never changes with a gradient, but is large and read by one leaf alone, to that leaf."""
    n = traced.n_leaves
    for state, shape in enumerate(traced.state_shapes):
        if owners[state] is not None or shape.size <= _LARGE_ELEMENTS:
            continue
        bit = 1 << (n + state)
        readers: set[int | None] = {leaf for leaf in range(n) if depends[leaf] & bit}
        readers |= {
            owners[other] for other in range(len(owners)) if depends[n + other] & bit and other != state
        }
        if len(readers) == 1:
            owners[state] = readers.pop()
    return owners


def _refusal(traced: TracedTransform, results: Sequence[int], held: Sequence[int]) -> CouplingError:
    n = traced.n_leaves
    bits = [1 << leaf for leaf in range(n)]
    extras = [0] * len(traced.extra_names)
    merging = next(traced.update.merges([*bits, *([0] * len(held)), *bits, *extras]), None)
    if merging is None:
        merging = next(traced.update.merges([*bits, *held, *bits, *extras]), None)
    if merging is None:
        merging = next(traced.init.merges(bits), None)
    culprit = "something in it" if merging is None else _culprit(merging)
    return CouplingError(
        f"cannot offload this transform: {culprit} couples leaves ({_example(traced, results, held)}), so that they "
        f"cannot be streamed one at a time; {_REMEDIES.get(culprit.split(' ')[0], _REMEDY)}",
        culprit,
    )


def _example(traced: TracedTransform, results: Sequence[int], held: Sequence[int]) -> str:
    for leaf, mask in enumerate(results):
        other = mask & ~(1 << leaf)
        if other:
            names = traced.leaf_paths[leaf], traced.leaf_paths[other.bit_length() - 1]
            return f"the update of '{names[0]}' depends on '{names[1]}'"
    state = next(index for index, mask in enumerate(held) if mask.bit_count() > 1)
    return f"its state '{traced.state_paths[state]}' depends on several leaves"


def _culprit(step: Step) -> str:
    """Returns the name of the transform whose code made ``step``, else the place in the code."""
    frames = [] if step.traceback is None else step.traceback.frames
    for frame in frames:
        name = _transform_of(frame.function_name)
        outside = "/jax/" not in frame.file_name and "/memascend_jax/" not in frame.file_name
        if outside and name and name not in _WRAPPERS:
            return name
    for frame in frames:
        if "/jax/" not in frame.file_name:
            return f"{frame.function_name} ({frame.file_name}:{frame.line_num})"
    return f"the primitive {step.primitive.name}"


def _transform_of(function_name: str) -> str:
    """Returns the function whose inner ``update`` or ``init`` a qualified name is of, or empty."""
    parts = function_name.split(".<locals>.")
    for outer, inner in pairwise(parts):
        if _UPDATE.match(inner):
            return outer.rpartition(".")[2]
    return ""


def is_constant_zero(program: Program, output: int) -> bool:
    """Returns whether an output of ``program`` is zero whatever the inputs are, as a frozen leaf's update is."""
    part = program.sliced([output])
    return not part.used_inputs() and _spreads_zero(part)


def _spreads_zero(part: Program) -> bool:
    """The whole array is never made: it is one constant that is spread, which may be a copy of a copy."""
    zero: dict[int, bool] = {}
    for step in part.steps:
        if step.primitive.name not in (
            "broadcast_in_dim",
            "copy",
            "copy_p",
            "convert_element_type",
            "reshape",
        ):
            return False
        source = step.inputs[0]
        known = zero.get(source, False) if isinstance(source, int) else _is_zero(source)
        zero[step.outputs[0]] = known
    last = part.outputs[0]
    return zero.get(last, False) if isinstance(last, int) else _is_zero(last)


def _is_zero(constant: Any) -> bool:
    return constant is not None and jax.numpy.shape(constant.value) == () and float(constant.value) == 0.0
