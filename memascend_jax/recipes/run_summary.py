# SPDX-License-Identifier: Apache-2.0
"""The figures of a finished run, from its metrics file and its committed results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memascend_jax.observe.step_figures import step_figures
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.run_state import RunState


def summarise(
    state: RunState,
    plan: RunPlan,
    lines: Sequence[dict[str, Any]],
    drains: Sequence[dict[str, Any]],
    peak_bytes: int,
) -> dict[str, Any]:
    """Returns the contents of ``summary.json`` from the lines of the steps and of the last update.

    Of the steps it has the figures of ``observe.step_figures``.

    Args:
        peak_bytes: the highest resident memory of this process; a resumed run's earlier ones are in ``lines``.
    """
    results = state.results
    known = {
        "schema": 1,
        "parameters": plan.layout.n_parameters,
        "trained_parameters": plan.layout.n_trained,
        "step": state.step,
        "tokens": state.tokens,
        "eval_loss_before": results.get("eval_loss_before"),
        "eval_loss_after": results.get("eval_loss_after"),
        "eval_losses": results.get("eval_losses", []),
        "planned_ssd_read_bytes_per_step": plan.ssd_read_bytes_per_step,
        "planned_ssd_write_bytes_per_step": plan.ssd_write_bytes_per_step,
        "planned_host_bytes": plan.memory.total_bytes,
        "pinned_bytes": plan.arena_bytes,
    }
    if not lines:
        # Somebody has removed the metrics; what the store remembers is told all the same.
        losses = {name: results.get(name) for name in ("loss_first", "loss_last")}
        return {**known, **losses, "host_peak_bytes": peak_bytes}
    last = lines[-1]
    return {
        **known,
        "loss": last["loss"],
        "learning_rate": last["learning_rate"],
        "grad_norm": last["grad_norm"],
        "loss_scale": last["loss_scale"],
        "skipped_steps": last["skipped_steps"],
        **({"noise_scale": last["noise_scale"]} if "noise_scale" in last else {}),
        **step_figures(lines, drains),
        "host_rss_bytes": last["host_rss_bytes"],
        "host_peak_bytes": max(peak_bytes, *(line["host_peak_bytes"] for line in lines)),
        "device_peak_bytes": last["device_peak_bytes"],
    }
