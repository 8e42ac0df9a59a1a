# SPDX-License-Identifier: Apache-2.0
"""Of which transform and parameters an offloaded state is, in a few strings that go with each commit of it.

A transform is told by the arithmetic on what belongs to a leaf: learning rates, decays and schedules are numbers from
outside of that, so that they may change when a state is restored. jax and optax may write the same arithmetic in
another way in another release, so it is compared within one only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from memascend_jax.errors import StoreError
from memascend_jax.optim.offload_leaf import LeafUpdate
from memascend_jax.optim.offload_program import Program, Ref
from memascend_jax.optim.offload_trace import TracedTransform
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore


def identity_of(
    traced: TracedTransform,
    updates: Sequence[LeafUpdate],
    specs: Mapping[int, TensorSpec],
    stored_params: Mapping[int, TensorSpec],
    tile_elements: int,
) -> dict[str, Any]:
    """Returns what the record of a state keeps of its transform, its parameters and its tensors."""
    leaves = [
        f"{path} {shape.dtype}{list(shape.shape)}"
        for path, shape in zip(traced.leaf_paths, traced.leaf_shapes, strict=True)
    ]
    arithmetic = [_arithmetic(update.program, _own_inputs(traced, update)) for update in updates]
    return {
        "leaves": [len(leaves), _digest(leaves)],
        "arithmetic": [f"jax {jax.__version__}, optax {optax.__version__}", _digest(arithmetic)],
        "tile_elements": tile_elements,
        "tensors": _packed([spec.name for spec in specs.values()]),
        "params": _packed({traced.leaf_paths[leaf]: spec.name for leaf, spec in stored_params.items()}),
    }


def tensors_of(identity: Mapping[str, Any]) -> list[str] | None:
    """Returns the names of a state's tensors; None in a record of an earlier release, which does not say."""
    if "tensors" not in identity:
        return None
    names: list[str] = _unpacked(identity["tensors"])
    return names


def check_identity(found: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Raises ``StoreError`` when the state in the store at ``path`` is of other parameters or another transform."""
    if not found:
        return
    beginning = f"the state in store '{path}' is of another transform or of other parameters:"
    if found["leaves"] != own["leaves"]:
        counts = found["leaves"][0], own["leaves"][0]
        raise StoreError(
            f"{beginning} it was made for {counts[0]:,} leaves, these are {counts[1]:,}"
            + (" of other names, shapes or types" if counts[0] == counts[1] else "")
            + "; give the pytree that init was given"
        )
    tensors = _unpacked(found["params"])
    for leaf, tensor in _unpacked(own["params"]).items():
        if tensors.get(leaf, tensor) != tensor:
            raise StoreError(
                f"{beginning} its parameter '{leaf}' is the tensor '{tensors[leaf]}', not '{tensor}'"
            )
    if found["arithmetic"][0] == own["arithmetic"][0] and found["arithmetic"] != own["arithmetic"]:
        raise StoreError(
            f"{beginning} its updates are computed otherwise; make offload with the transform that it was made with "
            "(learning rates, schedules and other numbers may differ)"
        )
    if found["tile_elements"] != own["tile_elements"]:
        raise StoreError(
            f"the state in store '{path}' was made with tile_elements={found['tile_elements']}, not "
            f"{own['tile_elements']}; pass that to offload"
        )


def check_tensors(store: TensorStore, specs: Iterable[TensorSpec], tile_elements: int) -> None:
    """Raises ``StoreError`` when the store's tensors are not ``specs``, those of a state of ``tile_elements``."""
    path = store.paths[0]
    for spec in specs:
        there = store.spec(spec.name) if spec.name in store else None
        if there == spec:
            continue
        if there is not None and replace(there, tile_elements=spec.tile_elements) == spec:
            raise StoreError(
                f"the state in store '{path}' was made with another tile_elements than {tile_elements:,}: "
                f"'{spec.name}' has tiles of {there.tile_elements:,} elements, not {spec.tile_elements:,}; pass the "
                "tile_elements that init was given"
            )
        raise StoreError(
            f"the state in store '{path}' is of another transform or of other parameters: '{spec.name}' should "
            f"be {spec}, found {there or 'missing'}"
        )


def _own_inputs(traced: TracedTransform, update: LeafUpdate) -> set[int]:
    states = {traced.state_input(state) for state in update.states}
    return {traced.grad_input(update.leaf), traced.param_input(update.leaf), *states} & set(update.inputs)


def _arithmetic(program: Program, own: set[int]) -> Any:
    """Returns the steps that depend on the inputs ``own``, by name and by which of them each reads."""
    numbers = {number: index for index, number in enumerate(sorted(own))}

    def known(ref: Ref) -> int | None:
        return numbers.get(ref) if isinstance(ref, int) else None

    steps = []
    for step in program.steps:
        operands = [known(ref) for ref in step.inputs]
        if all(operand is None for operand in operands):
            continue
        first = len(step.choosing)
        branches = [
            _arithmetic(
                branch, {index for index, operand in enumerate(operands[first:]) if operand is not None}
            )
            for branch in step.branches
        ]
        for number in step.outputs:
            numbers[number] = len(numbers)
        steps.append((step.primitive.name, operands, branches))
    return steps, [known(ref) for ref in program.outputs]


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:16]


def _packed(value: Any) -> str:
    """Every commit writes it: names are much alike, and the catalog's room is not large."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
