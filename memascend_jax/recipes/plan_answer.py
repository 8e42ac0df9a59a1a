# SPDX-License-Identifier: Apache-2.0
"""What a run would take: memory, disk, traffic and time, for a configuration or for a model that is only a shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memascend_jax.config import Config, has_store, store_paths
from memascend_jax.errors import DataError
from memascend_jax.memory.meter import available_memory_bytes
from memascend_jax.models.known_shapes import known_config
from memascend_jax.models.planned_shape import PlannedShape, planned_shape
from memascend_jax.recipes.checkpoint_space import (
    CheckpointSpace,
    check_checkpoint_folder,
    check_checkpoint_space,
    checkpoint_space,
    saves_checkpoints,
)
from memascend_jax.recipes.planning import disk_free_bytes, plan_config, plan_from_config, workload_of
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.recipes.store_place import check_places
from memascend_jax.storage.tensor_store import bytes_needed
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.step_time import PhaseTime, Speeds, bottleneck, predict_step
from memascend_jax.units import format_bytes

_STEPS = 1000


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan and what follows from it.

    Attributes:
        phases: the step's time; empty when no bandwidth is known.
        notes: sentences that a reader of the plan should know.
        disk_free_bytes: free where the store would go; None when that is not known, or not asked.
        checkpoints: what they take of the disk; None: none are saved.
    """

    plan: RunPlan
    model: str
    speeds: Speeds | None
    phases: Sequence[PhaseTime]
    notes: Sequence[str]
    disk_free_bytes: int | None
    checkpoints: CheckpointSpace | None

    @property
    def terabytes_written(self) -> float:
        """Terabytes (10^12) written to SSD in 1,000 steps, checkpoints included."""
        copied = self.checkpoints.bytes_per_step if self.checkpoints is not None else 0.0
        return (self.plan.ssd_write_bytes_per_step + copied) * _STEPS / 1e12

    def to_json(self) -> dict[str, Any]:
        """Returns the plan's own facts and what follows from them."""
        plan = self.plan
        needed = {name: bytes_needed(plan.specs, plan.scratch_bytes, name) for name in ("step", "checkpoint")}
        return {
            **plan.to_json(),
            "model": self.model,
            "notes": list(self.notes),
            "traffic": [asdict(phase) for phase in plan.traffic],
            "terabytes_written_per_1000_steps": round(self.terabytes_written, 6),
            "disk_bytes_by_durability": needed if plan.placement == "ssd" else {},
            "disk_free_bytes": self.disk_free_bytes,
            "checkpoints": self._checkpoint_facts(),
            "speeds": asdict(self.speeds) if self.speeds else None,
            "phases": [
                {**asdict(phase), "seconds": phase.seconds, "bound_by": phase.bound_by}
                for phase in self.phases
            ],
            "step_seconds": sum(phase.seconds for phase in self.phases) if self.phases else None,
            "bottleneck": bottleneck(self.phases) if self.phases else None,
        }

    def _checkpoint_facts(self) -> dict[str, Any] | None:
        space, speeds = self.checkpoints, self.speeds
        if space is None:
            return None
        # From the arena nothing is read; from SSD reading and writing share the disk, as in a step.
        read = space.step_bytes if self.plan.placement == "ssd" else 0
        seconds = None
        if speeds is not None:
            seconds = read / speeds.read_bytes_per_s + space.step_bytes / speeds.write_bytes_per_s
        return {
            "folder": str(space.folder),
            "every": space.every,
            "step_bytes": space.step_bytes,
            "kept": space.kept,
            "disk_bytes": space.total_bytes,
            "seconds": seconds,
        }


def answer_for_config(config: Config, speeds: Speeds | None, *, device_is_host: bool) -> PlanAnswer:
    """Returns the answer for a new run of ``config`` on this machine.

    Raises:
        BudgetError: it does not fit the budget, this machine's memory, or the disk.
        StoreError: its store cannot be made where it should be.
        ConfigError: it could not write its folder, or its checkpoints.
    """
    _check_places(config)
    plan = plan_from_config(config, device_is_host=device_is_host)
    answer = _answer(config, plan, config.model.source, speeds, [], disk_free_bytes(store_paths(config)))
    if answer.checkpoints is not None:
        check_checkpoint_space(answer.checkpoints, plan.disk_bytes)
    return answer


def _check_places(config: Config) -> None:
    """Looks where a new run would write, as the run does before its first byte."""
    if saves_checkpoints(config):
        check_checkpoint_folder(config)
    RunFolder(config).check_writable()
    if has_store(config):
        # What a run that is under way takes may be asked for too.
        check_places(config, open_stores=False)


def answer_for_model(
    config: Config, model: str, speeds: Speeds | None, *, device_is_host: bool
) -> PlanAnswer:
    """Returns the answer for ``model`` on any machine that has the budget of ``config``.

    Args:
        model: a name of ``known_shapes``, a ``config.json``, or a folder that holds one.
        config: everything but the model; without a budget it is what is available here.

    Raises:
        BudgetError: it does not fit the budget.
        DataError: the model is not known, or its shape makes no sense.
    """
    shape = planned_shape(read_model_config(model))
    plan = plan_config(config, shape.config, n_examples=0, this_machine=False, device_is_host=device_is_host)
    notes = [*shape.notes, *_machine_notes(config, shape)]
    return _answer(
        config, plan, model, speeds, notes, None, idle_elements=shape.idle_elements, this_machine=False
    )


def read_model_config(model: str) -> Mapping[str, Any]:
    """Returns the ``config.json`` that ``model`` names: a path to it or to its folder, or a known model.

    Raises:
        DataError: the file cannot be read, or no model of that name is known.
    """
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return known_config(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the model config '{path}': {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"cannot read the model config '{path}': expected a JSON object")
    return config


def _machine_notes(config: Config, shape: PlannedShape) -> list[str]:
    notes = []
    asked, available = config.offload.host_memory, available_memory_bytes()
    if asked is not None and asked > available:
        notes.append(f"this machine has {format_bytes(available)} of memory available, less than the budget")
    positions = shape.config.max_position_embeddings
    if config.data.seq_len > positions:
        notes.append(f"data.seq_len={config.data.seq_len} is more than the model's {positions} positions")
    return notes


def _answer(
    config: Config,
    plan: RunPlan,
    model: str,
    speeds: Speeds | None,
    notes: list[str],
    free: int | None,
    *,
    idle_elements: int = 0,
    this_machine: bool = True,
) -> PlanAnswer:
    workload = workload_of(config)
    phases = predict_step(plan, workload, speeds, idle_elements=idle_elements) if speeds else []
    if plan.memory.apart:
        notes.append(
            "the host's share of an accelerator's runtime is not in the plan: what is counted was measured on CPU"
        )
    layout = plan.layout
    space = checkpoint_space(config, layout.format, layout.tensors, layout.frozen, this_machine=this_machine)
    return PlanAnswer(plan, model, speeds, phases, notes, free, space)
