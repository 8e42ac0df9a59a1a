# SPDX-License-Identifier: Apache-2.0
"""A plan keeps its budget, spends what is left on less traffic, and is quick for models of any size."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from memascend_jax.errors import BudgetError
from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import parameter_count
from memascend_jax.optim.state_format import state_format
from memascend_jax.training.plan import RunPlan, Workload, least_tile_elements, plan_run
from memascend_jax.units import GIB, MIB

FORMAT = state_format("fp32", "bfloat16")
WORK = Workload(1, 1, 256, 0)


def plan(
    name: str,
    budget_bytes: int,
    *,
    work: Workload = WORK,
    disk_free_bytes: int | None = None,
    durability: str = "step",
) -> RunPlan:
    return plan_run(
        planned_shape(known_config(name)).config,
        FORMAT,
        work,
        placement="ssd",
        durability=durability,
        budget_bytes=budget_bytes,
        spend=True,
        disk_free_bytes=disk_free_bytes,
    )


@pytest.mark.parametrize("name", ["smollm2-135m", "tinyllama-1.1b"])
def test_more_memory_is_spent_within_the_budget_and_lowers_the_traffic(name: str) -> None:
    before: tuple[int, int] | None = None
    for budget in (
        800 * MIB,
        900 * MIB,
        1 * GIB,
        1200 * MIB,
        2 * GIB,
        4 * GIB,
        8 * GIB,
        12 * GIB,
        20 * GIB,
        40 * GIB,
    ):
        try:
            made = plan(name, budget)
        except BudgetError:
            assert before is None
            continue
        assert made.memory.total_bytes <= budget
        traffic = made.ssd_read_bytes_per_step, made.ssd_write_bytes_per_step
        if before is not None:
            assert all(now <= then for now, then in zip(traffic, before, strict=True))
        before = traffic
    assert before is not None
    # With room for everything only the new state is written, and nothing but the rows of a step read.
    assert before[0] < 0.05 * before[1]


def test_planning_takes_seconds_for_the_largest_models() -> None:
    began = time.perf_counter()
    made = plan("llama3-70b", 64 * GIB)
    assert made.memory.total_bytes <= 64 * GIB
    # 1.1 s on a slow core; it was a hundred when each size of an element was looked up again.
    assert time.perf_counter() - began < 30


def test_refusal_names_the_minimum_and_remedies_that_then_fit() -> None:
    work = Workload(4, 2, 4096, 0)
    with pytest.raises(BudgetError) as caught:
        plan("smollm2-135m", 900 * MIB, work=work)
    text = str(caught.value)
    found = re.search(r"offload\.host_memory=(\d+)MiB or more", text)
    assert found is not None
    minimum = int(found[1]) * MIB
    assert plan("smollm2-135m", minimum, work=work).memory.total_bytes <= minimum
    with pytest.raises(BudgetError):
        plan("smollm2-135m", minimum - 2 * MIB, work=work)
    shorter = re.findall(r"data\.seq_len=(\d+)", text)
    assert len(shorter) == 1
    assert plan("smollm2-135m", 900 * MIB, work=replace(work, seq_len=int(shorter[0])))
    with pytest.raises(BudgetError):
        plan("smollm2-135m", 900 * MIB, work=replace(work, seq_len=2 * int(shorter[0])))


def test_refusal_proposes_a_smaller_micro_batch_where_that_is_enough() -> None:
    work = Workload(16, 1, 512, 0)
    with pytest.raises(BudgetError) as caught:
        plan("smollm2-135m", 1 * GIB, work=work)
    assert "train.micro_batch_size=1 with train.gradient_accumulation_steps=16 (" in str(caught.value)
    assert plan("smollm2-135m", 1 * GIB, work=Workload(1, 16, 512, 0)).memory.fits


def test_a_store_that_the_disk_cannot_hold_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"needs 3\.\d\d GiB of disk space .* only 1\.00 GiB are free"):
        plan("smollm2-135m", 2 * GIB, disk_free_bytes=1 * GIB)
    # Half of it is enough for the other durability, which is chosen when it may be.
    assert (
        plan("smollm2-135m", 2 * GIB, disk_free_bytes=5 * GIB // 2, durability="plan").durability
        == "checkpoint"
    )
    with pytest.raises(BudgetError, match="durability=checkpoint, which takes about half"):
        plan("smollm2-135m", 2 * GIB, disk_free_bytes=5 * GIB // 2)


def test_tiles_of_huge_models_grow_so_that_their_number_does_not() -> None:
    assert least_tile_elements(parameter_count(planned_shape(known_config("llama3-8b")).config)) <= 1 << 17
    assert least_tile_elements(405_853_388_800) == 1 << 21
    assert least_tile_elements(1) == 1
