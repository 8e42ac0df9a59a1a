# SPDX-License-Identifier: Apache-2.0
"""The independent loop of ``plain_llama`` on the data and settings of a streamed run."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import plain_llama

from memascend_jax.optim.schedules import build_schedule


def reference(run, masters, dtype, steps, rate_factors=None, lora_scale=0.0):
    """Returns the losses and parameters of ``steps`` steps from ``masters``; the rest as for its ``train``."""
    config = run.config
    schedule_of = build_schedule(
        config.optimizer.schedule,
        config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        total_steps=steps,
    )
    values = jnp.array([schedule_of(step) for step in range(steps + 1)], jnp.float32)
    batches = [
        [dataclasses.asdict(batch) for batch in run.data.of_step(step)] for step in range(1, steps + 1)
    ]
    return plain_llama.train(
        masters,
        run.plan.layout.config,
        batches,
        lambda count: values[count],
        dtype=dtype,
        clip_norm=config.optimizer.clip_norm,
        weight_decay=config.optimizer.weight_decay,
        rate_factors=rate_factors,
        lora_scale=lora_scale,
    )
