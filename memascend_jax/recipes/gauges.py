# SPDX-License-Identifier: Apache-2.0
"""What a run's meter samples besides the process's memory: the arena by what it is for, the device, SSD traffic,
and what is available to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from memascend_jax.memory.meter import Gauges, memory_limit_bytes, memory_room
from memascend_jax.recipes.session import Session
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.plan_memory import slots_bytes
from memascend_jax.transfer.live_bytes import live_bytes


def build_gauges(session: Session) -> Gauges:
    """Returns the gauges of a running session."""
    device = jax.local_devices()[0]
    regions = session.arena.regions()
    kinds = sorted({_kind(name) for name in session.pool.classes})

    def gauges() -> Mapping[str, int | None]:
        leased = dict.fromkeys(kinds, 0)
        for name, nbytes in session.pool.leased_bytes().items():
            leased[_kind(name)] += nbytes
        read, written = session.placement.io_bytes()
        return {
            **{f"leased:{kind}": nbytes for kind, nbytes in leased.items()},
            "device": live_bytes(device, regions),
            "ssd_read": read,
            "ssd_written": written,
            "available": memory_room().available_bytes,
        }

    return gauges


def meter_facts(plan: RunPlan) -> dict[str, Any]:
    """Returns what does not change during a run: budget, prediction, limit, and the arena by what it is for."""
    arena: dict[str, int] = {}
    for name, size in plan.size_classes.items():
        arena[_kind(name)] = arena.get(_kind(name), 0) + slots_bytes(size, plan.page_bytes)
    arena["store"] = plan.arena_bytes - sum(arena.values())
    return {
        "budget_bytes": plan.memory.budget_bytes,
        "planned_bytes": plan.memory.total_bytes,
        "cgroup_limit_bytes": memory_limit_bytes(),
        "arena_bytes": {kind: nbytes for kind, nbytes in arena.items() if nbytes},
    }


def _kind(class_name: str) -> str:
    """``layer`` for ``layer:3538944``; classes of state whole in memory are named after tensors."""
    return "state" if "." in class_name else class_name.partition(":")[0]
