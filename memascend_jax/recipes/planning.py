# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the plan of its run. jax-free: nothing is loaded, nothing is written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memascend_jax.config import Config, store_paths
from memascend_jax.errors import BudgetError
from memascend_jax.memory.meter import available_memory_bytes
from memascend_jax.models.shapes import LlamaConfig
from memascend_jax.optim.state_format import StateFormat, state_format
from memascend_jax.recipes.inputs import open_data, open_model
from memascend_jax.recipes.run_folder import nearest_existing
from memascend_jax.storage.device import block_device_bytes, resolve_paths
from memascend_jax.training.plan import CHOICES, RunPlan, Workload, plan_run
from memascend_jax.units import format_bytes


def plan_from_config(config: Config) -> RunPlan:
    """Returns the plan of a new run that ``config`` describes; reads the data, of the model only its shape."""
    model = open_model(config)
    try:
        return plan_config(config, model.config, n_examples=open_data(config, model).sequences)
    finally:
        model.close()


def plan_config(
    config: Config, shape: LlamaConfig, *, n_examples: int, tile_elements: int | None = None
) -> RunPlan:
    """Returns the plan for a model of ``shape``.

    Args:
        n_examples: sequences held in memory.
        tile_elements: tile size of the store that a resumed run goes on with; None: free.

    Raises:
        BudgetError: the run does not fit the memory it was given.
    """
    choices = [replace(depths, tile_elements=tile_elements or depths.tile_elements) for depths in CHOICES]
    return plan_run(
        shape,
        state_format_of(config),
        Workload(
            config.train.micro_batch_size,
            config.train.gradient_accumulation_steps,
            config.data.seq_len,
            n_examples,
        ),
        placement="memory" if config.offload.placement == "memory" else "ssd",
        durability=config.offload.durability,
        budget_bytes=_budget(config),
        # Without a budget the run takes what makes it fast, and leaves the rest of the machine alone.
        spend=config.offload.host_memory is not None,
        disk_free_bytes=disk_free_bytes(store_paths(config)),
        choices=choices,
    )


def state_format_of(config: Config) -> StateFormat:
    """Returns the state format; ``model.compute_dtype=auto`` is bfloat16."""
    compute = config.model.compute_dtype
    return state_format(config.optimizer.state_format, "bfloat16" if compute == "auto" else compute)


def _budget(config: Config) -> int:
    available = available_memory_bytes()
    asked = config.offload.host_memory
    if asked is not None and asked > available:
        raise BudgetError(
            f"offload.host_memory is {format_bytes(asked)}, but only {format_bytes(available)} are available on "
            "this machine or in its memory cgroup; lower it, or free memory"
        )
    return available if asked is None else asked


def disk_free_bytes(paths: Sequence[Path]) -> int | None:
    """Returns how large a store at ``paths`` could be, or None when nothing is known of any of them.

    Members hold equal shares, so the fullest disk or shortest device decides. What a file holds already is counted as
    free: it is replaced, or it is this very store.
    """
    members = [Path(path) for path in resolve_paths(paths)]
    shares, disks = [], defaultdict(list)
    for path in members:
        size = block_device_bytes(str(path))
        if size is not None:
            shares.append(size)
        else:
            disks[nearest_existing(path).stat().st_dev].append(path)
    for together in disks.values():
        space = os.statvfs(nearest_existing(together[0]))
        held = sum(path.stat().st_blocks * 512 for path in together if path.exists())
        if space.f_blocks:  # Those that hold no data, such as /proc, have none.
            shares.append((space.f_bavail * space.f_frsize + held) // len(together))
    return min(shares) * len(members) if shares else None
