# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the plan of its run. jax-free: nothing is loaded, nothing is written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from memascend_jax.config import Config, store_paths
from memascend_jax.errors import BudgetError
from memascend_jax.memory.meter import memory_room, take_sample
from memascend_jax.models.adapters import model_tensors
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.optim.loss_scale import ScalePolicy, scale_policy
from memascend_jax.optim.state_format import StateFormat, state_format
from memascend_jax.recipes.checkpoint_space import checkpoint_consumers, checkpoint_space
from memascend_jax.recipes.lora import adapters_of, check_lora_source
from memascend_jax.recipes.parameter_groups import tensor_settings
from memascend_jax.storage.device import block_device_bytes, resolve_paths
from memascend_jax.storage.existing_path import nearest_existing
from memascend_jax.training.depths import CHOICES
from memascend_jax.training.plan import RunPlan, plan_run
from memascend_jax.training.workload import Workload
from memascend_jax.units import format_bytes


def plan_from_config(config: Config, *, device_is_host: bool = True) -> RunPlan:
    """Returns the plan of a new run that ``config`` describes; reads the data, of the model only its shape."""
    # Tokenizers and templates: not needed for a model that is only a shape.
    from memascend_jax.recipes.inputs import open_data, open_model

    model = open_model(config)
    try:
        check_lora_source(config, model.config, model.adapters)
        # Closed again: it is only looked at, and nothing is written.
        with closing(open_data(config, model, writes=False)) as data:
            n_examples = data.sequences
        return plan_config(config, model.config, n_examples=n_examples, device_is_host=device_is_host)
    finally:
        model.close()


def plan_config(
    config: Config,
    shape: ModelConfig,
    *,
    n_examples: int,
    tile_elements: int | None = None,
    this_machine: bool = True,
    device_is_host: bool = True,
) -> RunPlan:
    """Returns the plan for a model of ``shape``.

    Args:
        n_examples: sequences held in memory.
        tile_elements: tile size of the store that a resumed run goes on with; None: free.
        this_machine: budget and store must fit here; else the plan is for a machine that has them.
        device_is_host: as for ``plan_run``.

    Raises:
        BudgetError: the run does not fit the memory it was given.
        ConfigError: a parameter group decides about no parameter of the model, or nothing is trained; an adapter is
            for no layer, or larger than one.
    """
    # Here, because every command plans before it writes anything.
    adapters = adapters_of(config.lora, shape)
    tensors = model_tensors(shape, adapters)
    trained = tensor_settings(config.optimizer, tensors)
    choices = [replace(depths, tile_elements=tile_elements or depths.tile_elements) for depths in CHOICES]
    fmt, frozen = state_format_of(config), frozenset(tensor.name for tensor in tensors) - trained.keys()
    space = checkpoint_space(config, fmt, tensors, frozen, this_machine=this_machine)
    # A store that is there has its room: nothing is asked for it, nor offered to choose by.
    makes_store = this_machine and tile_elements is None
    return plan_run(
        shape,
        fmt,
        workload_of(config, n_examples),
        # The planner's own choice loses nothing in a crash, and keeps in memory what the budget has room for.
        placement="ssd" if config.offload.placement == "plan" else config.offload.placement,
        durability=config.offload.durability,
        in_backward=updates_in_backward(config),
        budget_bytes=_budget(config, this_machine),
        # Without a budget the run takes what makes it fast, and leaves the rest of the machine alone.
        spend=config.offload.host_memory is not None,
        device_is_host=device_is_host,
        disk_free_bytes=disk_free_bytes(store_paths(config)) if makes_store else None,
        choices=choices,
        frozen=frozen,
        adapters=adapters,
        more=checkpoint_consumers(config),
        reserved_bytes=space.missing_bytes
        if space is not None and space.on_store_disk and makes_store
        else 0,
        available_bytes=available_here() if this_machine else None,
    )


def workload_of(config: Config, n_examples: int = 0) -> Workload:
    """Returns what a step of the run computes on."""
    train = config.train
    return Workload(
        train.micro_batch_size,
        train.gradient_accumulation_steps,
        config.data.seq_len,
        n_examples,
        micro_norms=config.optimizer.log_noise_scale,
    )


def updates_in_backward(config: Config) -> bool:
    """Returns whether layers are updated in the backward: by default where nothing needs the whole gradient first."""
    asked = config.offload.update
    free = config.optimizer.clip_norm is None and not scale_policy_of(config).skips
    return free if asked == "plan" else asked == "in_backward"


def scale_policy_of(config: Config) -> ScalePolicy:
    """Returns the loss scale, and whether steps that are not finite are skipped."""
    optimizer = config.optimizer
    return scale_policy(
        optimizer.loss_scale,
        float16=config.model.compute_dtype == "float16",
        skip_nonfinite=optimizer.skip_nonfinite,
    )


def state_format_of(config: Config) -> StateFormat:
    """Returns the state format; ``model.compute_dtype=auto`` is bfloat16."""
    compute = config.model.compute_dtype
    return state_format(config.optimizer.state_format, "bfloat16" if compute == "auto" else compute)


def _budget(config: Config, this_machine: bool) -> int:
    room, available = memory_room(), available_here()
    asked = config.offload.host_memory
    if this_machine and asked is not None and asked > available:
        raise BudgetError(
            f"offload.host_memory is {format_bytes(asked)}, but only {format_bytes(available)} are available "
            f"{room.where}; lower it, or free memory"
        )
    return available if asked is None else asked


def available_here() -> int:
    """Returns the bytes that a run in this process could have resident: what it holds already counts."""
    return memory_room().available_bytes + take_sample().anonymous_bytes


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
