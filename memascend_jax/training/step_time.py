# SPDX-License-Identifier: Apache-2.0
"""How long a step will take: in each phase the longer of computing and I/O, for they run beside each other. Pure.

    t = Σ over phases of max(c, r / R + w / W)

with c the seconds of computing, r and w the bytes read and written, R and W the SSDs' bandwidths: a disk that reads and
writes at once shares its time between the two. What the optimizer computes on the processor is added to what the device
computes. The flush of a commit and copies to a device are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memascend_jax.models.model_config import LayerKind
from memascend_jax.training.backward_reach import backward_reach
from memascend_jax.training.model_layout import ModelLayout
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.stage_schedule import HEAD, LAYER, StageKey
from memascend_jax.training.step_traffic import BACKWARD, FORWARD
from memascend_jax.training.workload import Workload

#: Parameters per second of the fused AdamW on two busy cores of an EPYC without AVX-512, measured: see "What watching
#: costs" in docs/experiment_log.md. ``memascend plan --measure`` finds this machine's.
UPDATE_RATE = 0.5e9


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a machine does, sustained: bytes per second of all SSDs together, operations per second of the device.

    ``flops`` None: not known, so that only the I/O is predicted.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    flops: float | None = None
    update_rate: float = UPDATE_RATE


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step; ``compute_s`` None when the device's speed is not known."""

    phase: str
    compute_s: float | None
    io_s: float
    read_bytes: int
    write_bytes: int

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute_s or 0.0, self.io_s)

    @property
    def bound_by(self) -> str:
        """``SSD`` or ``compute``; ``SSD at least`` when the computing is not known."""
        if self.compute_s is None:
            return "SSD at least"
        return "SSD" if self.io_s > self.compute_s else "compute"


def predict_step(
    plan: RunPlan, workload: Workload, speeds: Speeds, *, idle_elements: int = 0
) -> list[PhaseTime]:
    """Returns the time of each phase of a step in the middle of a run.

    Args:
        idle_elements: parameters of the layers that a token does not touch (experts it is not sent to).
    """
    flops = step_flops(plan, workload, idle_elements=idle_elements)
    update_s = plan.layout.n_trained / speeds.update_rate
    return [
        PhaseTime(
            phase,
            None
            if speeds.flops is None
            else flops[phase] / speeds.flops + (update_s if phase == FORWARD else 0),
            read / speeds.read_bytes_per_s + write / speeds.write_bytes_per_s,
            read,
            write,
        )
        for phase, read, write in _phases(plan)
    ]


def _phases(plan: RunPlan) -> Iterator[tuple[str, int, int]]:
    moved = {traffic.phase: traffic for traffic in plan.traffic}
    for phase in (FORWARD, BACKWARD):
        traffic = moved.get(phase)
        yield phase, traffic.read_bytes if traffic else 0, traffic.write_bytes if traffic else 0


def step_flops(plan: RunPlan, workload: Workload, *, idle_elements: int = 0) -> dict[str, float]:
    """Returns the floating-point operations of each phase: two for each weight and token, and the attention's.

    A token attends to half of its sequence on average, or to what a window leaves of it. The backward computes its
    stages again, then multiplies as much for the gradients of their inputs, and as much again for those of what is
    trained; it ends at the lowest stage of which something is trained. The head's logits are computed in the forward,
    and again in the backward.
    """
    layout, tokens = plan.layout, workload.step_tokens
    config, reach = layout.config, backward_reach(layout)
    n_layers = config.num_hidden_layers
    parts = layout.stage_parts[StageKey(LAYER, 0)]
    weights = sum(part.n_elements for part in parts if len(part.shape) > 1)
    # What no token touches is spread over the layers evenly.
    used = 1 - idle_elements / (weights * n_layers)
    layers = 2.0 * used * weights * n_layers
    width = config.num_attention_heads * config.head_dim
    attention = [
        4.0 * width * _keys_seen(config.kind_of(index), workload.seq_len) for index in range(n_layers)
    ]
    head = 2.0 * config.vocab_size * config.hidden_size
    trained = 2.0 * used * sum(_trained_weights(layout, index) for index in range(n_layers))
    trained += head * layout.is_trained(layout.head_tensor)
    # Once for what is computed again, once for the gradients of inputs, where something below needs them.
    passed = n_layers - min(max(reach.lowest + 1, 0), n_layers)
    times = reach.layers + passed
    inputs = times * 2.0 * used * weights + 3 * sum(attention[reach.first_layer :])
    inputs += head * (1 + reach.passes(StageKey(HEAD, 0)))
    return {
        FORWARD: tokens * (layers + sum(attention) + head),
        BACKWARD: tokens * (inputs + trained),
    }


def _keys_seen(kind: LayerKind, seq_len: int) -> float:
    """Returns how many tokens a token of a sequence sees on average."""
    if kind.window is None or kind.window >= seq_len:
        return seq_len / 2
    # The first tokens see what there is before them, each of the others the whole window.
    return kind.window * (1 - kind.window / (2 * seq_len))


def _trained_weights(layout: ModelLayout, index: int) -> int:
    parts = layout.trained_parts(StageKey(LAYER, index))
    return sum(part.n_elements for part in parts if len(part.shape) > 1)


def bottleneck(phases: Sequence[PhaseTime]) -> str:
    """Returns what the step waits for most, in words with its share of the step."""
    total = sum(phase.seconds for phase in phases)
    if not total:
        return "nothing"
    waits: dict[str, float] = {}
    for phase in phases:
        waits[phase.bound_by] = waits.get(phase.bound_by, 0.0) + phase.seconds
    name = max(waits, key=lambda key: waits[key])
    longest = max((phase for phase in phases if phase.bound_by == name), key=lambda phase: phase.seconds)
    return f"{name}, for {waits[name] / total:.0%} of the step, most of it in the {longest.phase}"
