# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a step: the longer of computing and I/O in each phase, and what it waits for."""

from __future__ import annotations

import pytest

from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.planned_shape import planned_shape
from memascend_jax.models.shapes import parameter_count
from memascend_jax.optim.state_format import state_format
from memascend_jax.training.plan import RunPlan, plan_run
from memascend_jax.training.step_time import PhaseTime, Speeds, bottleneck, predict_step, step_flops
from memascend_jax.training.workload import Workload
from memascend_jax.units import GIB, MIB

WORK = Workload(2, 4, 512, 0)


def plan(budget_bytes: int = 900 * MIB, placement: str = "ssd") -> RunPlan:
    return plan_run(
        planned_shape(known_config("smollm2-135m")).config,
        state_format("fp32", "bfloat16"),
        WORK,
        placement=placement,
        durability="step",
        budget_bytes=budget_bytes,
    )


def test_a_phase_takes_the_longer_of_computing_and_moving() -> None:
    made = plan()
    for flops in (1e9, 1e15):
        forward, backward = predict_step(made, WORK, Speeds(2e9, 1e9, flops, 1e12))
        for phase, traffic in zip((forward, backward), made.traffic, strict=True):
            assert phase.phase == traffic.phase
            assert phase.io_s == traffic.read_bytes / 2e9 + traffic.write_bytes / 1e9
            assert phase.compute_s is not None
            assert phase.seconds == max(phase.compute_s, phase.io_s)
            assert phase.bound_by == ("compute" if flops == 1e9 else "SSD")


def test_computing_is_two_operations_for_each_weight_and_token_three_times_that_backwards() -> None:
    made = plan()
    flops = step_flops(made, WORK)
    per_token = 2.0 * (parameter_count(made.layout.config) - 30 * 2 * 576 - 576)
    attention = 2.0 * 512 * 576 * 30
    assert flops["forward"] == pytest.approx(WORK.step_tokens * (per_token + attention))
    assert flops["backward"] == pytest.approx(3 * flops["forward"])
    idle = step_flops(made, WORK, idle_elements=1_000_000)
    assert flops["forward"] - idle["forward"] == pytest.approx(WORK.step_tokens * 2e6)


def test_the_optimizer_is_counted_where_it_runs() -> None:
    made = plan()
    slow, fast = (predict_step(made, WORK, Speeds(1e12, 1e12, 1e12, rate)) for rate in (1e8, 1e12))
    assert slow[0].seconds - fast[0].seconds == pytest.approx(134_515_008 / 1e8, rel=0.01)
    assert slow[1] == fast[1]


def test_without_the_devices_speed_the_time_is_a_least() -> None:
    phases = predict_step(plan(), WORK, Speeds(2e9, 1e9))
    assert [phase.bound_by for phase in phases] == ["SSD at least"] * 2
    assert all(phase.seconds == phase.io_s for phase in phases)


def test_state_in_memory_moves_nothing() -> None:
    phases = predict_step(plan(8 * GIB, "memory"), WORK, Speeds(1e9, 1e9, 1e12))
    assert [phase.io_s for phase in phases] == [0.0, 0.0]
    assert bottleneck(phases) == "compute, for 100% of the step, most of it in the backward"


def test_the_bottleneck_is_what_most_of_the_time_goes_to() -> None:
    phases = [PhaseTime("forward", 1.0, 6.0, 0, 0), PhaseTime("backward", 2.0, 1.0, 0, 0)]
    assert bottleneck(phases) == "SSD, for 75% of the step, most of it in the forward"
    assert bottleneck([PhaseTime("forward", 0.0, 0.0, 0, 0)]) == "nothing"
