# SPDX-License-Identifier: Apache-2.0
"""The arena maps what is asked for, to the page: for the tensors of real models less than a thousandth more."""

from __future__ import annotations

import pytest

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.rounding import exact_bytes, one_size_bytes, power_of_two_bytes
from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import LM_HEAD_NAME, tensor_shapes
from memascend_jax.optim.state_format import state_format
from memascend_jax.training.plan import plan_run
from memascend_jax.training.workload import Workload
from memascend_jax.units import GIB

#: Bytes of each model's tensors in bf16.
MODELS = ("llama3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")


def sizes_of(name: str, layers: int | None = None) -> list[int]:
    """Bytes of every tensor; ``layers``: of so many layers, the embedding and the head, what a stream holds at once."""
    config = planned_shape(known_config(name)).config
    kept = {f"layer.{index}" for index in range(config.num_hidden_layers if layers is None else layers)}
    return [
        2 * tensor.elements
        for tensor in tensor_shapes(config)
        if tensor.stage in kept | {"embed"} or tensor.name == LM_HEAD_NAME or layers is None
    ]


@pytest.mark.parametrize("name", MODELS)
def test_less_than_a_thousandth_is_mapped_beyond_what_is_asked(name: str) -> None:
    sizes = sizes_of(name)
    assert 1.0 <= exact_bytes(sizes) / sum(sizes) <= 1.001
    # The ways it replaces: a tenth more for sizes that are nearly powers of two, else close to twice as much; and
    # ten times as much for a pool of four layers.
    assert power_of_two_bytes(sizes) / sum(sizes) > (1.1 if name.startswith("llama") else 1.7)
    assert one_size_bytes(sizes_of(name, layers=4)) / sum(sizes_of(name, layers=4)) > 10


def test_the_real_arena_maps_just_that() -> None:
    # A hundredth of each tensor, so that this machine holds it; odd sizes come with it.
    sizes = [max(size // 100, 1) for size in sizes_of("qwen2.5-7b", layers=8)]
    arena = PinnedArena(exact_bytes(sizes), pin="none")
    slots = [arena.allocate(size) for size in sizes]
    assert sum(nbytes for _, nbytes in arena.regions()) == arena.capacity_bytes == exact_bytes(sizes)
    assert arena.in_use_bytes == arena.capacity_bytes
    with pytest.raises(MemoryError):
        arena.allocate(1)
    for slot in slots:
        slot.release()
    arena.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_such_a_model_wastes_nothing_in_its_slots(name: str) -> None:
    plan = plan_run(
        planned_shape(known_config(name)).config,
        state_format("fp32", "bfloat16"),
        Workload(1, 1, 512, 0),
        placement="ssd",
        durability="step",
        budget_bytes=64 * GIB,
    )
    slots = [size.nbytes for kind, size in plan.size_classes.items() if kind.startswith("layer:")]
    layer = [
        part for key, parts in plan.layout.stage_parts.items() if str(key) == "layer.0" for part in parts
    ]
    asked = {2 * part.n_elements for part in layer}
    assert set(slots) == {-(-nbytes // 4096) * 4096 for nbytes in asked}


def test_rounding_of_single_sizes() -> None:
    assert exact_bytes([1, 4096, 4097]) == 4096 + 4096 + 8192
    assert power_of_two_bytes([1, 2, 3, 1 << 30, (1 << 30) + 1]) == 1 + 2 + 4 + (1 << 30) + (1 << 31)
    assert one_size_bytes([1, 5, 3]) == 15
