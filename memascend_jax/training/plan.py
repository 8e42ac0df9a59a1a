# SPDX-License-Identifier: Apache-2.0
"""The plan of a training run: where every byte will live, and the SSD traffic of a step. jax-free and pure.

The same arithmetic chooses slot counts and tile sizes, prints the plan, and is what the run's counters are held to.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from memascend_jax.errors import BudgetError
from memascend_jax.memory.budget import Consumer, MemoryPlan, choose_plan
from memascend_jax.memory.pool import SizeClass
from memascend_jax.models.adapters import Adapters
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, parameter_count
from memascend_jax.optim.state_format import BLOCK_BYTES, StateFormat, itemsize
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.tensor_store import TensorSpec, bytes_needed
from memascend_jax.training.depths import CHOICES, Depths, least_tile_elements, with_spill
from memascend_jax.training.model_layout import ModelLayout, plan_layout
from memascend_jax.training.plan_memory import (
    BOUNCE_BYTES,
    compiles_apart,
    memory_consumers,
    size_classes_of,
    slots_bytes,
    stage_parameters,
)
from memascend_jax.training.residency import Residency, early_groups
from memascend_jax.training.spare_memory import spend_memory
from memascend_jax.training.ssd_classes import residency_of, spilled_bytes, stage_capacity
from memascend_jax.training.step_traffic import PhaseTraffic, step_traffic
from memascend_jax.training.workload import Workload, smaller_workloads
from memascend_jax.units import MIB, counted, format_bytes, round_up


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Where every byte of a run lives and what a step moves.

    ``size_classes`` and disk traffic count in disk blocks, memory in whole pages of ``page_bytes``.
    """

    layout: ModelLayout
    placement: str
    durability: Durability
    depths: Depths
    memory: MemoryPlan
    size_classes: dict[str, SizeClass]
    specs: tuple[TensorSpec, ...]
    scratch_bytes: int
    spilled_bytes: int
    disk_bytes: int
    traffic: tuple[PhaseTraffic, ...]
    page_bytes: int

    @property
    def ssd_read_bytes_per_step(self) -> int:
        return sum(phase.read_bytes for phase in self.traffic)

    @property
    def ssd_write_bytes_per_step(self) -> int:
        return sum(phase.write_bytes for phase in self.traffic)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena: every slot, and the store's bounce memory."""
        slots = sum(slots_bytes(size, self.page_bytes) for size in self.size_classes.values())
        return slots + (BOUNCE_BYTES if self.placement == "ssd" else 0)

    @property
    def capacity(self) -> dict[str, int]:
        """Resident keys of each stage kind, for the prefetcher."""
        return stage_capacity(self.layout, self.depths)

    @property
    def compiles_apart(self) -> bool:
        """Whether the compiler gets a process of its own."""
        return compiles_apart(self.layout, self.depths)

    @property
    def residency(self) -> Residency:
        """Which update groups stay in host memory."""
        return residency_of(self.layout, self.depths)

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the printable plan: what, where, how much."""
        host = [
            (consumer.what, "host", f"{format_bytes(consumer.nbytes)}  {consumer.how}".rstrip())
            for consumer in self.memory.consumers
        ]
        state = self.layout.format
        names = ", ".join(leaf.suffix.removeprefix("#") for leaf in state.leaves)
        trained, size = self.layout.n_trained, itemsize(state.param_dtype)
        frozen = self.layout.n_parameters - trained
        stored = round(trained * state.stored_bytes)
        where = "SSD" if self.placement == "ssd" else "host"
        adapters = self.layout.adapters
        disk = []
        if adapters is not None:
            what = f"rank {adapters.rank} beside {counted(len(adapters.modules), 'linear layer', 'linear layers')}"
            share = f"{trained:,} trained parameters, {trained / self.layout.n_parameters:.3g} of all"
            disk.append(("LoRA adapters", where, f"{what} of each layer: {share}"))
        disk += [
            (
                f"parameters and state ({names})",
                where,
                f"{format_bytes(stored)}  {state.stored_bytes:.4g} bytes each",
            )
        ]
        if frozen:
            how = f"{size} bytes each, {frozen / self.layout.n_parameters:.3g} of all"
            disk.append(("frozen parameters", where, f"{format_bytes(frozen * size)}  {how}"))
        if self.placement != "ssd":
            disk.append(("on disk before the export", "SSD", "nothing: a stop or a crash loses the training"))
        if self.placement == "ssd":
            disk += [
                ("gradients of a step", "SSD", format_bytes(self.scratch_bytes)),
                ("store file", "SSD", f"{format_bytes(self.disk_bytes)}  durability {self.durability}"),
                ("read per step", "SSD", format_bytes(self.ssd_read_bytes_per_step)),
                ("written per step", "SSD", format_bytes(self.ssd_write_bytes_per_step)),
            ]
        total = (
            "host memory in all",
            "host",
            f"{format_bytes(self.memory.total_bytes)} planned, "
            f"{format_bytes(self.memory.budget_bytes)} allowed",
        )
        device = [(consumer.what, "device", format_bytes(consumer.nbytes)) for consumer in self.memory.apart]
        if device:
            device.append(("device memory in all", "device", format_bytes(self.memory.apart_bytes)))
        return [*disk, *device, *host, total]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values, for ``plan.json``."""
        return {
            "schema": 1,
            "placement": self.placement,
            "durability": self.durability if self.placement == "ssd" else None,
            "parameters": self.layout.n_parameters,
            "trained_parameters": self.layout.n_trained,
            "adapters": self.layout.adapters.to_json() if self.layout.adapters is not None else None,
            "state_format": self.layout.format.name,
            "depths": asdict(self.depths),
            "planned_host_bytes": self.memory.total_bytes,
            "budget_host_bytes": self.memory.budget_bytes,
            "arena_bytes": self.arena_bytes,
            "consumers": [asdict(consumer) for consumer in self.memory.consumers],
            "device_consumers": [asdict(consumer) for consumer in self.memory.apart],
            "size_classes": {name: asdict(size) for name, size in self.size_classes.items()},
            "disk_bytes": self.disk_bytes,
            "ssd_read_bytes_per_step": self.ssd_read_bytes_per_step,
            "ssd_write_bytes_per_step": self.ssd_write_bytes_per_step,
        }


def plan_run(
    config: ModelConfig,
    fmt: StateFormat,
    workload: Workload,
    *,
    placement: str,
    durability: str,
    budget_bytes: int,
    in_backward: bool = False,
    spend: bool = False,
    device_is_host: bool = True,
    disk_free_bytes: int | None = None,
    choices: Sequence[Depths] = CHOICES,
    page_bytes: int = mmap.PAGESIZE,
    frozen: frozenset[str] = frozenset(),
    adapters: Adapters | None = None,
    more: Sequence[Consumer] = (),
    reserved_bytes: int = 0,
    available_bytes: int | None = None,
) -> RunPlan:
    """Returns the fastest plan that keeps the budget.

    Args:
        placement: ``ssd``, ``host`` or ``memory``.
        durability: ``step``, ``checkpoint``, or ``plan``: ``step`` if ``disk_free_bytes`` has room for it.
        budget_bytes: host memory for the whole process.
        in_backward: update layers in the backward; only without a clip or loss scale.
        spend: use what is left of the budget to keep gradients, parameters and state in memory, in this order: by the
            SSD traffic that a byte of memory saves.
        device_is_host: what the device holds is host memory, as on a CPU; else it has memory of its own, unbounded.
        disk_free_bytes: free space where the store goes; None: unknown, not checked here.
        page_bytes: what every slot is rounded up to in memory; the disk counts in blocks.
        frozen: tensors that are not trained; not all of them.
        adapters: LoRA adapters beside the model's own tensors.
        more: what the run takes of host memory besides a step.
        reserved_bytes: of ``disk_free_bytes``, what is for other things than the store.
        available_bytes: host memory that there is, beyond which no budget helps; None: as much as is asked for.

    Raises:
        BudgetError: not even the smallest choice fits, with the numbers and what would help.
    """

    on_ssd = placement == "ssd"
    candidates: list[tuple[ModelLayout, Depths]] = []

    def memory_of(candidate: tuple[ModelLayout, Depths], workload: Workload) -> MemoryPlan:
        consumers = (*memory_consumers(*candidate, workload, placement, page_bytes), *more)
        if device_is_host:
            return MemoryPlan(consumers, budget_bytes)
        host = tuple(consumer for consumer in consumers if consumer.category != "device")
        device = (stage_parameters(*candidate), *(c for c in consumers if c.category == "device"))
        return MemoryPlan(host, budget_bytes, device)

    @cache
    def layout_of(tile_elements: int, head_tile_bytes: int) -> ModelLayout:
        return plan_layout(
            config,
            fmt,
            target_tile_elements=tile_elements,
            target_head_bytes=head_tile_bytes,
            frozen=frozen,
            adapters=adapters,
        )

    def memory_plans() -> Iterator[MemoryPlan]:
        least = least_tile_elements(parameter_count(config))
        for depths in with_spill(choices) if on_ssd else choices:
            depths = replace(depths, tile_elements=max(depths.tile_elements, least), early_update=in_backward)
            candidates.append((layout_of(depths.tile_elements, depths.head_tile_bytes), depths))
            yield memory_of(candidates[-1], workload)

    choose_plan(
        memory_plans(),
        lambda: _options(partial(memory_of, candidates[-1]), workload, placement, available_bytes),
    )
    layout, depths = candidates[-1]
    if spend and on_ssd:
        spare = budget_bytes - memory_of((layout, depths), workload).total_bytes
        depths = spend_memory(layout, depths, spare, page_bytes)
    plan = _plan(
        layout,
        depths,
        workload,
        placement,
        durability,
        memory_of((layout, depths), workload),
        None if disk_free_bytes is None else max(disk_free_bytes - reserved_bytes, 0),
        page_bytes,
    )
    if disk_free_bytes is not None and plan.disk_bytes + reserved_bytes > disk_free_bytes:
        also = f" and {format_bytes(reserved_bytes)} for its checkpoints" if reserved_bytes else ""
        raise BudgetError(
            f"the run needs {format_bytes(plan.disk_bytes)} of disk space for its store with durability "
            f"{plan.durability}{also}, but only {format_bytes(disk_free_bytes)} are free there. What would help: "
            "another disk (offload.store), several (offload.store=[/mnt/a,/mnt/b])"
            + (", a smaller checkpoint.keep, another checkpoint.dir" if reserved_bytes else "")
            + (
                ""
                if plan.durability == "checkpoint"
                else ", offload.durability=checkpoint, which takes about half"
            )
        )
    return plan


def store_specs(layout: ModelLayout) -> tuple[TensorSpec, ...]:
    """Returns the store's tensors: each parameter and its state leaves, in forward order.

    Frozen ones are written once: read-only, in one place in every durability.
    """
    specs = []
    for tensor in layout.tensors:
        tile = layout.tile_elements[tensor.name]
        by_row = tensor.name == EMBED_NAME
        specs.append(
            TensorSpec(
                tensor.name,
                layout.format.param_dtype,
                tensor.shape,
                tile,
                row_access=by_row,
                mutable=layout.is_trained(tensor.name),
            )
        )
        specs += [
            TensorSpec(
                tensor.name + leaf.suffix,
                leaf.dtype,
                layout.leaf_shape(tensor.name, leaf.suffix),
                leaf.stride(tile),
            )
            for leaf in layout.leaves_of(tensor.name)
        ]
    return tuple(specs)


def _plan(
    layout: ModelLayout,
    depths: Depths,
    workload: Workload,
    placement: str,
    durability: str,
    memory: MemoryPlan,
    disk_free_bytes: int | None,
    page_bytes: int,
) -> RunPlan:
    on_ssd, specs = placement == "ssd", store_specs(layout)
    scratch = sum(
        round_up(tensor.elements * itemsize(layout.format.grad_dtype), BLOCK_BYTES)
        for tensor in layout.trained
    ) + spilled_bytes(layout, depths, workload)
    kept = _durability(durability, bytes_needed(specs, scratch, "step"), disk_free_bytes)
    return RunPlan(
        layout=layout,
        placement=placement,
        durability=kept,
        depths=depths,
        memory=memory,
        size_classes=size_classes_of(layout, depths, workload, placement),
        specs=specs,
        scratch_bytes=scratch,
        spilled_bytes=spilled_bytes(layout, depths, workload) if on_ssd else 0,
        disk_bytes=bytes_needed(specs, scratch, kept) if on_ssd else 0,
        traffic=_traffic(layout, depths, workload) if on_ssd else (),
        page_bytes=page_bytes,
    )


def _durability(wanted: str, step_bytes: int, disk_free_bytes: int | None) -> Durability:
    if wanted == "plan":
        return "checkpoint" if disk_free_bytes is not None and step_bytes > disk_free_bytes else "step"
    return "step" if wanted == "step" else "checkpoint"


def _traffic(layout: ModelLayout, depths: Depths, workload: Workload) -> tuple[PhaseTraffic, ...]:
    return step_traffic(
        layout,
        stage_capacity(layout, depths),
        residency_of(layout, depths),
        early_groups(layout) if depths.early_update else frozenset(),
        depths.prefetch_depth,
        workload.step_tokens,
        spilled_bytes(layout, depths, workload),
    )


def _options(
    memory_of: Callable[[Workload], MemoryPlan],
    workload: Workload,
    placement: str,
    available_bytes: int | None,
) -> Iterator[str]:
    """Yields what would make the smallest choice fit, the nearest of each kind, with the memory it would need."""
    minimum = round_up(memory_of(workload).total_bytes, MIB)
    fits_here = available_bytes is None or minimum <= available_bytes
    if fits_here:
        yield f"offload.host_memory={minimum // MIB}MiB or more"
    if placement != "ssd":
        yield "offload.placement=ssd"
    told: set[str] = set()
    for smaller, words in smaller_workloads(workload):
        key = words.partition("=")[0]
        needed = memory_of(smaller)
        if needed.fits and key not in told:
            told.add(key)
            yield f"{words} ({format_bytes(needed.total_bytes)})"
    if not fits_here:
        yield f"a machine with {format_bytes(minimum)} of memory available"
