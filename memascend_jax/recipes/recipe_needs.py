# SPDX-License-Identifier: Apache-2.0
"""What a recipe needs of a machine, by the planner: the lines at the head of the shipped recipes. jax-free.

They are printed by ``memascend plan RECIPE --needs``, and a test holds the recipes to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memascend_jax.config import Config
from memascend_jax.errors import ConfigError
from memascend_jax.models.known_sources import shape_of_source
from memascend_jax.recipes.inputs import SMOLLM2
from memascend_jax.recipes.plan_answer import answer_for_model
from memascend_jax.training.step_time import Speeds
from memascend_jax.units import format_bytes, format_duration

#: The machine that times are said for: one SSD that reads 7 GB/s and writes 5 GB/s, a GPU that sustains 100 TFLOP/s,
#: a processor that updates 2 billion parameters per second.
REFERENCE = Speeds(7e9, 5e9, 100e12, 2e9)
_STEPS = 1000


def needs_lines(config: Config, model: str | None = None) -> list[str]:
    """Returns what a run of ``config`` needs, a line each, for a machine with a GPU.

    Args:
        model: a name of ``known_shapes`` or a path, as for ``answer_for_model``; None: by ``model.source``.

    Raises:
        ConfigError: the model has no published shape to plan by.
        BudgetError: it does not fit ``offload.host_memory``.
    """
    source = config.model.source
    model = model or (source if source == SMOLLM2 else shape_of_source(source))
    if model is None:
        raise ConfigError(
            f"--needs is by the published shape of a model, and none is known for model.source={source!r}; give --model"
        )
    answer = answer_for_model(config, model, REFERENCE, device_is_host=False)
    return _lines(config, answer.to_json())


def _lines(config: Config, facts: Mapping[str, Any]) -> list[str]:
    train = config.train
    tokens = train.micro_batch_size * train.gradient_accumulation_steps * config.data.seq_len
    device = sum(consumer["nbytes"] for consumer in facts["device_consumers"])
    disk = facts["disk_bytes_by_durability"]
    checkpoints = facts["checkpoints"]
    saved = f"; checkpoints {format_bytes(checkpoints['disk_bytes'])}" if checkpoints is not None else ""
    speeds = REFERENCE
    return [
        f"parameters  {facts['parameters']:,}, trained: {facts['trained_parameters']:,}",
        f"GPU memory  {format_bytes(device)}",
        f"RAM         {format_bytes(facts['planned_host_bytes'])} of the process, "
        f"{format_bytes(facts['arena_bytes'])} of it pinned",
        f"SSD         {format_bytes(disk['step'])}, or {format_bytes(disk['checkpoint'])} with "
        f"offload.durability=checkpoint{saved}",
        f"traffic     {format_bytes(facts['ssd_read_bytes_per_step'])} read, "
        f"{format_bytes(facts['ssd_write_bytes_per_step'])} written per step; "
        f"{facts['terabytes_written_per_1000_steps']:.3g} TB written in {_STEPS:,} steps",
        f"time        {format_duration(facts['step_seconds'] * _STEPS)} per {_STEPS:,} steps of {tokens:,} tokens; "
        f"waits for {facts['bottleneck'].partition(', most')[0]}",
        f"            (GPU {speeds.flops or 0:.0e} operations/s, SSD {speeds.read_bytes_per_s / 1e9:.0f} GB/s read, "
        f"{speeds.write_bytes_per_s / 1e9:.0f} GB/s written)",
    ]
