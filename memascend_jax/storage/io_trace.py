# SPDX-License-Identifier: Apache-2.0
"""Transfers of the store on the timeline: one event per batch, direction and member, from submission to completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memascend_jax.observe.trace import READ, WRITE, Recorder
from memascend_jax.storage.batch import Requests
from memascend_jax.storage.engine import EngineTicket


def record_transfers(
    recorder: Recorder, requests: Requests | None, tickets: Sequence[EngineTicket], paths: Sequence[str]
) -> None:
    """Records what the ended ``tickets`` of one batch moved; without ``requests`` it is the store's metadata."""
    for ticket in tickets:
        for member, direction, nbytes, submitted_ns, begun_ns, ended_ns in ticket.spans():
            category = READ if direction == "read" else WRITE
            recorder.add(
                category,
                f"{category} {member}: {paths[member]}",
                "metadata" if requests is None else describe(requests, category),
                submitted_ns,
                ended_ns,
                {"bytes": nbytes, "queued_us": (begun_ns - submitted_ns) // 1000},
                overlapping=True,
            )


def describe(requests: Requests, category: str) -> str:
    """Returns a name for what is read or written: the first tensor, and how many more."""
    names = dict.fromkeys(_names(requests, category))
    first = next(iter(names), "nothing")
    return first if len(names) < 2 else f"{first} and {len(names) - 1} more"


def _names(requests: Requests, category: str) -> Iterator[str]:
    if category == READ:
        yield from (tensor.name for tensor, _, _ in requests.reads)
        yield from (f"rows of {tensor.name}" for tensor, _, _ in requests.unit_reads)
        yield from (scratch.name for scratch, _, _, _ in requests.scratch_reads)
    else:
        yield from (f"{tensor.name}[{tile}]" for tensor, tile, _ in requests.writes)
        yield from (scratch.name for scratch, _, _, _ in requests.scratch_writes)
