# SPDX-License-Identifier: Apache-2.0
"""What a step computes on, and the smaller workloads that a refusal proposes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Shorter sequences are no remedy for anything.
SHORTEST_SEQUENCE = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step computes on; ``micro_norms``: the norm of each micro-batch's gradient is found out too."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    n_examples: int
    micro_norms: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        return self.micro_batch_tokens * self.gradient_accumulation_steps


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
