# SPDX-License-Identifier: Apache-2.0
"""The plan of a training run: where every byte will live, and the SSD traffic of a step. jax-free and pure.

The same arithmetic chooses slot counts and tile sizes, prints the plan, and is what the run's counters are held to.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from memascend_jax.errors import BudgetError
from memascend_jax.memory.budget import Consumer, MemoryPlan, choose_plan
from memascend_jax.memory.pool import SizeClass
from memascend_jax.models.shapes import EMBED_NAME, LlamaConfig, parameter_count
from memascend_jax.optim.state_format import BLOCK_BYTES, StateFormat, itemsize
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.tensor_store import TensorSpec, bytes_needed
from memascend_jax.training.model_layout import ModelLayout, plan_layout
from memascend_jax.training.residency import (
    Residency,
    early_groups,
    gradient_offsets,
    plan_residency,
    spooled_groups,
)
from memascend_jax.training.slot_classes import (
    GRADIENTS,
    INPUTS,
    SPOOL,
    UPDATE,
    host_classes,
    memory_classes,
    part_class,
)
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey
from memascend_jax.training.step_traffic import PhaseTraffic, step_traffic
from memascend_jax.units import MIB, counted, format_bytes, round_up

#: Interpreter, jax, flax, optax, tokenizers and loaded executables; the compiler at its peak. Measured:
#: "Resident memory of the runtime" and "The plan against the peak" in docs/experiment_log.md.
RUNTIME_BYTES = 310 * MIB
COMPILER_BYTES = 110 * MIB
#: Runs of one configuration differ by so much: threads, backends, the order of what is freed, a timeline.
RESERVE_BYTES = 16 * MIB
#: Blocks from this size on are given back to the kernel when they are freed.
TIGHT_HEAP_BYTES = 1 * MIB
#: Models from this size on are compiled in a process of their own.
APART_PARAMETERS = 1 << 25
#: The store's own memory for copies (imports, exports, embedding rows), from the arena.
BOUNCE_BYTES = 4 * MIB
#: Rings, queues and tables of the store.
STORE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step computes on."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    n_examples: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        return self.micro_batch_tokens * self.gradient_accumulation_steps


@dataclass(frozen=True, slots=True)
class Depths:
    """The choices that trade memory for speed, ordered fast to small in ``CHOICES``.

    ``gradient_groups`` and ``state_groups`` of the update stay in host memory: what a spare budget is spent on.
    ``heap_bytes``: freed blocks of up to this stay with the C library: 14 % less processor time in a step.
    ``early_update``: layers are updated in the backward, and their gradients never leave memory.
    ``spill_inputs``: the layers' inputs wait for the backward on SSD; tried where the same without it does not fit.
    """

    prefetch_depth: int
    layer_slots: int
    head_slots: int
    update_depth: int
    tile_elements: int
    head_tile_bytes: int
    gradient_groups: int = 0
    state_groups: int = 0
    heap_bytes: int = TIGHT_HEAP_BYTES
    spill_inputs: bool = False
    early_update: bool = False


CHOICES = (
    Depths(2, 4, 3, 6, 1 << 20, 8 * MIB, heap_bytes=16 * MIB),
    Depths(2, 4, 3, 6, 1 << 20, 8 * MIB),
    Depths(2, 4, 2, 4, 1 << 19, 8 * MIB),
    Depths(1, 3, 2, 3, 1 << 18, 4 * MIB),
    Depths(1, 2, 2, 2, 1 << 17, 2 * MIB),
)
#: Four blocks at the end of the heap (``memory.allocator``), and what lies between others: measured at most 5.2 in all.
_KEPT_BLOCKS = 6
SPOOL_SLOTS = 8
INPUT_SLOTS = 3
#: Tiles that a model is cut into at most, about; a larger one gets larger tiles, whose slots it does not notice.
MOST_TILES = 1 << 18
#: Shorter sequences are no remedy for anything.
SHORTEST_SEQUENCE = 64


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
        return _capacity(self.layout, self.depths)

    @property
    def compiles_apart(self) -> bool:
        """Whether the model is large enough for a compiler process of its own: a small one is not worth its start."""
        return _compiles_apart(self.layout)

    @property
    def residency(self) -> Residency:
        """Which update groups stay in host memory."""
        return _residency(self.layout, self.depths)

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the printable plan: what, where, how much."""
        host = [
            (consumer.what, "host", f"{format_bytes(consumer.nbytes)}  {consumer.how}".rstrip())
            for consumer in self.memory.consumers
        ]
        state = self.layout.format
        names = ", ".join(leaf.suffix.removeprefix("#") for leaf in state.leaves)
        stored = round(self.layout.n_parameters * state.stored_bytes)
        where = "SSD" if self.placement == "ssd" else "host"
        disk = [
            (
                f"parameters and state ({names})",
                where,
                f"{format_bytes(stored)}  {state.stored_bytes:.4g} bytes each",
            )
        ]
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
    config: LlamaConfig,
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

    Raises:
        BudgetError: not even the smallest choice fits, with the numbers and what would help.
    """

    on_ssd = placement == "ssd"
    candidates: list[tuple[ModelLayout, Depths]] = []

    def memory_of(candidate: tuple[ModelLayout, Depths], workload: Workload) -> MemoryPlan:
        consumers = tuple(_consumers(*candidate, workload, placement, page_bytes))
        if device_is_host:
            return MemoryPlan(consumers, budget_bytes)
        host = tuple(consumer for consumer in consumers if consumer.category != "device")
        device = (_stage_parameters(*candidate), *(c for c in consumers if c.category == "device"))
        return MemoryPlan(host, budget_bytes, device)

    def memory_plans() -> Iterator[MemoryPlan]:
        least = least_tile_elements(parameter_count(config))
        for depths in _with_spill(choices) if on_ssd else choices:
            depths = replace(depths, tile_elements=max(depths.tile_elements, least), early_update=in_backward)
            candidates.append((_layout(config, fmt, depths), depths))
            yield memory_of(candidates[-1], workload)

    choose_plan(memory_plans(), lambda: _options(partial(memory_of, candidates[-1]), workload, placement))
    layout, depths = candidates[-1]
    if spend and on_ssd:
        spare = budget_bytes - memory_of((layout, depths), workload).total_bytes
        depths = _spend(layout, depths, spare, page_bytes)
    plan = _plan(
        layout,
        depths,
        workload,
        placement,
        durability,
        memory_of((layout, depths), workload),
        disk_free_bytes,
        page_bytes,
    )
    if disk_free_bytes is not None and plan.disk_bytes > disk_free_bytes:
        raise BudgetError(
            f"the run needs {format_bytes(plan.disk_bytes)} of disk space for its store with durability "
            f"{plan.durability}, but only {format_bytes(disk_free_bytes)} are free there. What would help: another disk"
            " (offload.store), several (offload.store=[/mnt/a,/mnt/b])"
            + (
                ""
                if plan.durability == "checkpoint"
                else ", offload.durability=checkpoint, which takes about half"
            )
        )
    return plan


def _compiles_apart(layout: ModelLayout) -> bool:
    return layout.n_parameters >= APART_PARAMETERS


def _with_spill(choices: Sequence[Depths]) -> Iterator[Depths]:
    """Yields each choice, and the same with the layers' inputs on SSD: they are read long after they are written."""
    for depths in choices:
        yield depths
        yield replace(depths, spill_inputs=True)


def least_tile_elements(n_parameters: int) -> int:
    """Returns the smallest tile that a model is cut into: of a huge one, few enough to plan and keep in tables."""
    return 1 << (max(n_parameters // MOST_TILES, 1) - 1).bit_length()


def slots_bytes(size: SizeClass, page_bytes: int) -> int:
    """Returns the memory of all slots of a class: each is whole pages."""
    return round_up(size.nbytes, page_bytes) * size.count


def _spend(layout: ModelLayout, depths: Depths, spare_bytes: int, page_bytes: int) -> Depths:
    """Returns ``depths`` with as much kept in memory as ``spare_bytes`` hold."""
    gradients = round_up(
        max(gradient_offsets(layout, group)[1] for group in layout.update_groups), page_bytes
    )
    state = round_up(max(group.nbytes for group in layout.update_groups), page_bytes)
    n_groups = len(layout.update_groups)
    n_spooled = len(spooled_groups(layout, in_backward=depths.early_update))

    def afford(cost: int, most: int) -> int:
        nonlocal spare_bytes
        count = min(max(spare_bytes, 0) // cost, most)
        spare_bytes -= count * cost
        return count

    # A byte of gradients saves writing and reading it; a byte of parameters or of state only reading it.
    gradient_groups = afford(gradients, n_spooled)
    more_layers = afford(
        _stage_bytes(layout, LAYER, page_bytes), max(layout.n_layers - depths.layer_slots, 0)
    )
    more_tiles = afford(
        _stage_bytes(layout, HEAD, page_bytes), max(layout.n_head_tiles - depths.head_slots, 0)
    )
    state_groups = 0
    if gradient_groups == n_spooled:
        # A group's whole slot has room for its gradients: where it had some, the slot for them alone is free again.
        # One slot is kept back, as the groups are spread evenly up to one.
        spare_bytes -= gradients
        state_groups = (
            afford(state - gradients * n_spooled // n_groups, n_groups) if spare_bytes >= state else 0
        )
        gradient_groups = min(gradient_groups, n_groups - state_groups)
    return replace(
        depths,
        layer_slots=depths.layer_slots + more_layers,
        head_slots=depths.head_slots + more_tiles,
        gradient_groups=gradient_groups,
        state_groups=state_groups,
    )


def _stage_bytes(layout: ModelLayout, kind: str, page_bytes: int = BLOCK_BYTES) -> int:
    """Bytes of the slots of one stage."""
    return sum(
        round_up(_part_bytes(layout, math.prod(part.memory_shape)), page_bytes)
        for part in layout.stage_parts[StageKey(kind, 0)]
    )


def _part_bytes(layout: ModelLayout, elements: int) -> int:
    return round_up(elements * itemsize(layout.format.param_dtype), BLOCK_BYTES)


def store_specs(layout: ModelLayout) -> tuple[TensorSpec, ...]:
    """Returns the store's tensors: each parameter and its state leaves, in forward order."""
    specs = []
    for tensor in layout.tensors:
        tile = layout.tile_elements[tensor.name]
        by_row = tensor.name == EMBED_NAME
        specs.append(
            TensorSpec(tensor.name, layout.format.param_dtype, tensor.shape, tile, row_access=by_row)
        )
        specs += [
            TensorSpec(
                tensor.name + leaf.suffix,
                leaf.dtype,
                layout.leaf_shape(tensor.name, leaf.suffix),
                leaf.stride(tile),
            )
            for leaf in layout.format.leaves
        ]
    return tuple(specs)


def _layout(config: LlamaConfig, fmt: StateFormat, depths: Depths) -> ModelLayout:
    return plan_layout(
        config, fmt, target_tile_elements=depths.tile_elements, target_head_bytes=depths.head_tile_bytes
    )


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
        round_up(math.prod(tensor.shape) * itemsize(layout.format.grad_dtype), BLOCK_BYTES)
        for tensor in layout.tensors
    ) + _spilled_bytes(layout, depths, workload)
    kept = _durability(durability, bytes_needed(specs, scratch, "step"), disk_free_bytes)
    return RunPlan(
        layout=layout,
        placement=placement,
        durability=kept,
        depths=depths,
        memory=memory,
        size_classes=_size_classes(layout, depths, workload, placement),
        specs=specs,
        scratch_bytes=scratch,
        spilled_bytes=_spilled_bytes(layout, depths, workload) if on_ssd else 0,
        disk_bytes=bytes_needed(specs, scratch, kept) if on_ssd else 0,
        traffic=_traffic(layout, depths, workload) if on_ssd else (),
        page_bytes=page_bytes,
    )


def _size_classes(
    layout: ModelLayout, depths: Depths, workload: Workload, placement: str
) -> dict[str, SizeClass]:
    if placement == "ssd":
        return ssd_classes(layout, depths, workload)
    if placement == "host":
        return host_classes(layout, early_update=depths.early_update)
    return memory_classes(layout)


def _durability(wanted: str, step_bytes: int, disk_free_bytes: int | None) -> Durability:
    if wanted == "plan":
        return "checkpoint" if disk_free_bytes is not None and step_bytes > disk_free_bytes else "step"
    return "step" if wanted == "step" else "checkpoint"


def _input_bytes(layout: ModelLayout, workload: Workload) -> int:
    """Bytes of one layer's input of one micro-batch, whole blocks."""
    values = workload.micro_batch_tokens * layout.config.hidden_size
    return round_up(values * itemsize(layout.format.param_dtype), BLOCK_BYTES)


def _spilled_bytes(layout: ModelLayout, depths: Depths, workload: Workload) -> int:
    inputs = layout.n_layers * workload.gradient_accumulation_steps * _input_bytes(layout, workload)
    return inputs if depths.spill_inputs else 0


def ssd_classes(layout: ModelLayout, depths: Depths, workload: Workload) -> dict[str, SizeClass]:
    """Returns the pool's size classes for streaming: exact sizes of stage parts, update slots, spool slots."""
    counts: dict[str, SizeClass] = {}
    capacity = _capacity(layout, depths)
    for key in (StageKey(LAYER, 0), StageKey(NORM, 0), StageKey(HEAD, 0)):
        for part in layout.stage_parts[key]:
            nbytes = _part_bytes(layout, math.prod(part.memory_shape))
            name = part_class(key.kind, nbytes)
            known = counts.get(name, SizeClass(nbytes, 0))
            counts[name] = SizeClass(nbytes, known.count + capacity[key.kind])
    residency = _residency(layout, depths)
    counts[UPDATE] = SizeClass(
        max(group.nbytes for group in layout.update_groups), depths.update_depth + len(residency.state)
    )
    early = early_groups(layout) if depths.early_update else frozenset()
    if residency.gradients or early:
        largest = max(
            gradient_offsets(layout, layout.update_groups[index])[1] for index in residency.gradients | early
        )
        # Two layers' gradients: one is updated while the next arrives.
        moving = 2 * -(-len(early) // layout.n_layers)
        counts[GRADIENTS] = SizeClass(largest, len(residency.gradients) + moving)
    counts[SPOOL] = SizeClass(spool_slot_bytes(layout, depths), SPOOL_SLOTS)
    if depths.spill_inputs:
        counts[INPUTS] = SizeClass(_input_bytes(layout, workload), INPUT_SLOTS)
    return counts


def spool_slot_bytes(layout: ModelLayout, depths: Depths) -> int:
    """Returns the bytes of a slot that carries gradients to the spool."""
    largest = max(math.prod(tensor.shape) for tensor in layout.tensors)
    return round_up(min(largest, depths.tile_elements) * itemsize(layout.format.grad_dtype), BLOCK_BYTES)


def _traffic(layout: ModelLayout, depths: Depths, workload: Workload) -> tuple[PhaseTraffic, ...]:
    return step_traffic(
        layout,
        _capacity(layout, depths),
        _residency(layout, depths),
        early_groups(layout) if depths.early_update else frozenset(),
        depths.prefetch_depth,
        workload.step_tokens,
        _spilled_bytes(layout, depths, workload),
    )


def _residency(layout: ModelLayout, depths: Depths) -> Residency:
    return plan_residency(
        layout, depths.state_groups, depths.gradient_groups, in_backward=depths.early_update
    )


def _capacity(layout: ModelLayout, depths: Depths) -> dict[str, int]:
    return {
        LAYER: min(depths.layer_slots, layout.n_layers),
        HEAD: min(depths.head_slots, layout.n_head_tiles),
        NORM: 1,
    }


def _consumers(
    layout: ModelLayout, depths: Depths, workload: Workload, placement: str, page_bytes: int
) -> Iterator[Consumer]:
    classes = _size_classes(layout, depths, workload, placement)
    yield Consumer("runtime", "interpreter and libraries", RUNTIME_BYTES, "measured")
    if not _compiles_apart(layout):
        yield Consumer("runtime", "XLA compiler", COMPILER_BYTES, "measured")
    if depths.heap_bytes > TIGHT_HEAP_BYTES:
        yield Consumer("runtime", "freed memory not given back", _KEPT_BLOCKS * depths.heap_bytes)
    yield Consumer("runtime", "reserve", RESERVE_BYTES, "what differs between runs")
    yield Consumer("data", "tokenized examples", workload.n_examples * workload.seq_len * 16)
    if placement == "ssd":
        for kind, what in ((LAYER, "layer slots"), (HEAD, "head tile slots"), (NORM, "norm slots")):
            chosen = [size for name, size in classes.items() if name.startswith(f"{kind}:")]
            slots = sum(size.count for size in chosen)
            held = sum(slots_bytes(size, page_bytes) for size in chosen)
            yield Consumer("arena", what, held, counted(slots, "slot", "slots"))
        for name, what in (
            (UPDATE, "optimizer tile slots"),
            (GRADIENTS, "gradients kept in memory"),
            (SPOOL, "gradient spool slots"),
            (INPUTS, "stage input slots"),
        ):
            if name not in classes:
                continue
            size = classes[name]
            how = f"{size.count} x {format_bytes(size.nbytes)}"
            yield Consumer("arena", what, slots_bytes(size, page_bytes), how)
        yield Consumer("arena", "store copies", BOUNCE_BYTES, "imports, exports, embedding rows")
        yield Consumer("runtime", "store tables and rings", STORE_BYTES)
    else:
        total = sum(slots_bytes(size, page_bytes) for size in classes.values())
        what = "parameters, state and gradients"
        yield Consumer("arena", what, total, f"placement {placement}")
    yield from _device_consumers(layout, depths, workload)


def _stage_parameters(layout: ModelLayout, depths: Depths) -> Consumer:
    """The parameters that a device with memory of its own holds: those of the stages being computed and copied."""
    stages = min(depths.prefetch_depth + 1, layout.n_layers)
    nbytes = stages * _stage_bytes(layout, LAYER) + 2 * _stage_bytes(layout, HEAD)
    return Consumer(
        "device", "stage parameters", nbytes, f"{counted(stages, 'layer', 'layers')}, 2 head tiles"
    )


def _device_consumers(layout: ModelLayout, depths: Depths, workload: Workload) -> Iterator[Consumer]:
    config, compute = layout.config, itemsize(layout.format.param_dtype)
    grad = itemsize(layout.format.grad_dtype)
    hidden, inner, tokens = config.hidden_size, config.intermediate_size, workload.micro_batch_tokens
    held = 0 if depths.spill_inputs else layout.n_layers
    inputs = (held + 2) * workload.step_tokens * hidden * compute
    how = counted(held, "layer", "layers") if held else "the others on SSD"
    yield Consumer("device", "stage inputs", inputs, how)
    parts = [part.n_elements for part in layout.stage_parts[StageKey(LAYER, 0)]]
    # Two layers' rounded gradients exist at once: one leaves while the next is computed. Sums over micro-batches are
    # in fp32; of the operands of products the largest exist widened.
    summed = 4 if workload.gradient_accumulation_steps > 1 else 0
    gradients = sum(parts) * (2 * grad + summed)
    layer = gradients + 4 * (tokens * (10 * hidden + 5 * inner) + 3 * max(parts))
    rows = min(2 * workload.step_tokens, config.vocab_size) * hidden
    tile = layout.head_rows * hidden
    head = tile * (3 * 4 + grad) + 3 * 8 * MIB + workload.step_tokens * hidden * 8 + rows * 12
    what = "layer" if layer > head else "head and embedding"
    yield Consumer("device", f"workspace of the {what}", max(layer, head), "the larger of layer and head")


def _options(
    memory_of: Callable[[Workload], MemoryPlan], workload: Workload, placement: str
) -> Iterator[str]:
    """Yields what would make the smallest choice fit, the nearest of each kind, with the memory it would need."""
    minimum = round_up(memory_of(workload).total_bytes, MIB)
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


def smaller_workloads(workload: Workload) -> Iterator[tuple[Workload, str]]:
    """Yields workloads that need less memory, each with the keys that make them; the nearest of a kind first."""
    batch, steps, seq_len = (
        workload.micro_batch_size,
        workload.gradient_accumulation_steps,
        workload.seq_len,
    )
    if batch > 1:
        yield (
            replace(workload, micro_batch_size=1, gradient_accumulation_steps=batch * steps),
            f"train.micro_batch_size=1 with train.gradient_accumulation_steps={batch * steps}",
        )
    if batch * steps > 1:
        yield (
            replace(workload, micro_batch_size=1, gradient_accumulation_steps=1),
            "train.micro_batch_size=1 with train.gradient_accumulation_steps=1",
        )
    while seq_len > SHORTEST_SEQUENCE:
        seq_len //= 2
        yield replace(workload, seq_len=seq_len), f"data.seq_len={seq_len}"
