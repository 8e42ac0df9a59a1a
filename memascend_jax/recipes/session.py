# SPDX-License-Identifier: Apache-2.0
"""The parts of a run, built from its plan and taken down in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from memascend_jax.config import Config
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SlotPool
from memascend_jax.models.model_stages import ModelStages
from memascend_jax.observe import trace
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.adamw import AdamW
from memascend_jax.optim.loss_scale import ScaleState
from memascend_jax.optim.schedules import build_schedule
from memascend_jax.recipes.parameter_groups import tensor_settings
from memascend_jax.recipes.planning import scale_policy_of
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.forward_backward import StreamedModel
from memascend_jax.training.host_placement import HostPlacement
from memascend_jax.training.memory_placement import MemoryPlacement
from memascend_jax.training.placement import Placement
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.rows_ahead import RowsAhead
from memascend_jax.training.ssd_placement import SsdPlacement
from memascend_jax.training.stage_functions import StageFunctions
from memascend_jax.training.stage_inputs import StageInputs, make_inputs
from memascend_jax.training.step import Asked, TrainStep
from memascend_jax.training.trace_stages import trace_stages
from memascend_jax.training.update import Updater
from memascend_jax.transfer import Transfer, make_transfer


@dataclass(frozen=True, slots=True)
class Session:
    """What a run trains, evaluates and decodes with."""

    placement: Placement
    model: StreamedModel
    train_step: TrainStep
    clock: StepClock
    arena: PinnedArena
    pool: SlotPool


@contextmanager
def open_arena(plan: RunPlan) -> Iterator[PinnedArena]:
    """Yields the arena of exactly the planned bytes; closed at the end unless the run failed."""
    arena = PinnedArena(plan.arena_bytes)
    # After a failure slots may be leased or read still; the process ends with them, and the failure is what counts.
    yield arena
    arena.close()


@contextmanager
def open_session(
    config: Config,
    plan: RunPlan,
    arena: PinnedArena,
    store: TensorStore | None,
    total_steps: int,
    scaling: ScaleState | None = None,
) -> Iterator[Session]:
    """Builds placement, compiled model and optimizer on an arena and a store that the caller owns.

    Args:
        scaling: the loss scale and counters that a resumed run goes on with.
    """
    import jax

    clock = StepClock()
    pool = SlotPool(arena, plan.size_classes)
    transfer = make_transfer(jax.local_devices()[0], arena)
    placement = _build_placement(plan, store, pool, transfer, clock)
    rows = RowsAhead(placement)
    inputs = make_inputs(plan.spilled_bytes, store, pool, transfer, clock)
    model = _build_model(plan, placement, clock, rows, inputs)
    try:
        yield Session(
            placement,
            model,
            _build_step(config, plan, model, placement, rows, total_steps, scaling),
            clock,
            arena,
            pool,
        )
    except BaseException:
        with suppress(Exception):
            placement.close()
        raise
    model.close()
    placement.close()
    pool.close()
    transfer.close()


def _build_placement(
    plan: RunPlan, store: TensorStore | None, pool: SlotPool, transfer: Transfer, clock: StepClock
) -> Placement:
    if plan.placement == "host":
        return HostPlacement(plan.layout, pool, transfer, clock, early_update=plan.depths.early_update)
    if store is None:
        return MemoryPlacement(plan.layout, pool, transfer, clock)
    return SsdPlacement(
        plan.layout,
        store,
        pool,
        transfer,
        clock,
        update_depth=plan.depths.update_depth,
        residency=plan.residency,
    )


def _build_model(
    plan: RunPlan, placement: Placement, clock: StepClock, rows: RowsAhead, inputs: StageInputs
) -> StreamedModel:
    fmt = plan.layout.format
    stages = ModelStages(plan.layout.config, fmt.param_dtype, adapters=plan.layout.adapters)
    functions = StageFunctions(stages, fmt.grad_dtype)
    if trace.current is not None:
        trace_stages(functions, trace.current)
    return StreamedModel(
        plan.layout,
        functions,
        placement,
        clock,
        rows_ahead=rows,
        inputs=inputs,
        capacity=plan.capacity,
        prefetch_depth=plan.depths.prefetch_depth,
    )


def _build_step(
    config: Config,
    plan: RunPlan,
    model: StreamedModel,
    placement: Placement,
    rows: RowsAhead,
    total_steps: int,
    scaling: ScaleState | None,
) -> TrainStep:
    optimizer = config.optimizer
    hyper = AdamW(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    updater = Updater(
        plan.layout,
        placement,
        hyper,
        tensor_settings(optimizer, plan.layout.tensors),
        rows,
        seed=config.train.seed,
    )
    schedule = build_schedule(
        optimizer.schedule,
        optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
    )
    return TrainStep(
        model,
        updater,
        schedule,
        optimizer.clip_norm,
        policy=scale_policy_of(config),
        scaling=scaling,
        in_backward=plan.depths.early_update,
        asked=Asked(stage_norms=optimizer.log_norms, noise=optimizer.log_noise_scale),
    )
