# SPDX-License-Identifier: Apache-2.0
"""Every consumer of memory of a run, with its bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from memascend_jax.memory.budget import Consumer
from memascend_jax.memory.pool import SizeClass
from memascend_jax.optim.state_format import itemsize
from memascend_jax.training.backward_reach import backward_reach
from memascend_jax.training.depths import TIGHT_HEAP_BYTES, Depths
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.slot_classes import GRADIENTS, INPUTS, SPOOL, UPDATE, host_classes, memory_classes
from memascend_jax.training.ssd_classes import ssd_classes, stage_bytes
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey
from memascend_jax.training.workload import Workload
from memascend_jax.units import MIB, counted, format_bytes, round_up

#: Interpreter, jax, flax, optax, tokenizers and loaded executables; the compiler at its peak. Measured:
#: "Resident memory of the runtime" and "The plan against the peak" in docs/experiment_log.md.
RUNTIME_BYTES = 310 * MIB
COMPILER_BYTES = 110 * MIB
#: Runs of one configuration differ by so much: threads, backends, the order of what is freed, a timeline.
RESERVE_BYTES = 16 * MIB
#: Models from this size on are compiled in a process of their own, and all where memory is tight.
APART_PARAMETERS = 1 << 25
#: The store's own memory for copies (imports, exports, embedding rows), from the arena.
BOUNCE_BYTES = 4 * MIB
#: Rings, queues and tables of the store.
STORE_BYTES = 4 * MIB
#: Four blocks at the end of the heap (``memory.allocator``), and what lies between others: measured at most 5.2 in all.
_KEPT_BLOCKS = 6


def memory_consumers(
    layout: ModelLayout, depths: Depths, workload: Workload, placement: str, page_bytes: int
) -> Iterator[Consumer]:
    classes = size_classes_of(layout, depths, workload, placement)
    yield Consumer("runtime", "interpreter and libraries", RUNTIME_BYTES, "measured")
    if not compiles_apart(layout, depths):
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


def size_classes_of(
    layout: ModelLayout, depths: Depths, workload: Workload, placement: str
) -> dict[str, SizeClass]:
    if placement == "ssd":
        return ssd_classes(layout, depths, workload)
    if placement == "host":
        return host_classes(layout, early_update=depths.early_update)
    return memory_classes(layout)


def slots_bytes(size: SizeClass, page_bytes: int) -> int:
    """Returns the memory of all slots of a class: each is whole pages."""
    return round_up(size.nbytes, page_bytes) * size.count


def compiles_apart(layout: ModelLayout, depths: Depths) -> bool:
    """Whether the compiler gets a process of its own: a small model with memory to spare is not worth its start."""
    return layout.n_parameters >= APART_PARAMETERS or depths.heap_bytes == TIGHT_HEAP_BYTES


def _most_trained(layout: ModelLayout) -> int:
    """Returns the elements of the layer of which most is trained."""
    keys = (StageKey(LAYER, index) for index in range(layout.n_layers))
    return max(sum(part.n_elements for part in layout.trained_parts(key)) for key in keys)


def stage_parameters(layout: ModelLayout, depths: Depths) -> Consumer:
    """The parameters that a device with memory of its own holds: those of the stages being computed and copied."""
    stages = min(depths.prefetch_depth + 1, layout.n_layers)
    nbytes = stages * stage_bytes(layout, LAYER) + 2 * stage_bytes(layout, HEAD)
    return Consumer(
        "device", "stage parameters", nbytes, f"{counted(stages, 'layer', 'layers')}, 2 head tiles"
    )


def _device_consumers(layout: ModelLayout, depths: Depths, workload: Workload) -> Iterator[Consumer]:
    config, compute = layout.config, itemsize(layout.format.param_dtype)
    grad = itemsize(layout.format.grad_dtype)
    hidden, inner, tokens = config.hidden_size, config.intermediate_size, workload.micro_batch_tokens
    reach = backward_reach(layout)
    held = 0 if depths.spill_inputs else reach.layers
    inputs = (held + 2) * workload.step_tokens * hidden * compute
    how = "the others on SSD" if depths.spill_inputs else counted(held, "layer", "layers")
    yield Consumer("device", "stage inputs", inputs, how)
    parts = [part.n_elements for part in layout.stage_parts[StageKey(LAYER, 0)]]
    # Two layers' rounded gradients exist at once: one leaves while the next is computed. Sums over micro-batches are
    # in fp32; of the operands of products the largest exist widened.
    summed = 4 if workload.gradient_accumulation_steps > 1 else 0
    if workload.micro_norms:
        # A micro-batch's gradient is there beside the sum until its norm is known.
        summed += 4
    gradients = _most_trained(layout) * (2 * grad + summed)
    # Heads together may be wider than the hidden size; where they are normed, what goes in and comes out is kept.
    width = 6 * hidden + 4 * max(hidden, config.query_size)
    if config.qk_norm:
        width += 3 * (config.query_size + config.key_size)
    layer = gradients + 4 * (tokens * (width + 5 * inner) + 3 * max(parts))
    rows = min(2 * workload.step_tokens, config.vocab_size) * hidden
    tile = layout.head_rows * hidden
    # Of a table the sums, those of one micro-batch and the rounded ones of two tiles, of which one leaves; of rows what
    # the tied head has, and the sums.
    of_tile = 3 * 4 + 2 * grad if layout.is_trained(layout.head_tensor) else 4
    of_row = 12 if reach.embedding else 4
    head = tile * of_tile + 3 * 8 * MIB + workload.step_tokens * hidden * 8 + rows * of_row
    what = "layer" if layer > head else "head and embedding"
    yield Consumer("device", f"workspace of the {what}", max(layer, head), "the larger of layer and head")
