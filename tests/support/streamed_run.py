# SPDX-License-Identifier: Apache-2.0
"""Runs the product's training step on the tiny recipe without its screen, files and export."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memascend_jax.config import load_config
from memascend_jax.recipes.inputs import open_data, open_model
from memascend_jax.recipes.planning import plan_config
from memascend_jax.recipes.run_store import open_store
from memascend_jax.recipes.session import Session, open_arena, open_session
from memascend_jax.training.initialise import initialise_state
from memascend_jax.training.loop import StepData
from memascend_jax.training.model_layout import PARAMETER
from memascend_jax.training.plan import RunPlan


@dataclass
class StreamedRun:
    """A session over freshly initialised random weights, with its data."""

    config: Any
    plan: RunPlan
    session: Session
    data: StepData

    def train(self, steps: int) -> list[float]:
        """Trains steps 1 to ``steps``, committing each, and returns their losses."""
        return self.train_from(1, steps)

    def train_from(self, first: int, last: int) -> list[float]:
        """Trains steps ``first`` to ``last``, committing each, and returns their losses."""
        losses = []
        for step in range(first, last + 1):
            losses.append(
                self.session.train_step(step, self.data.of_step(step), self.data.of_step(step + 1)).loss
            )
            self.session.placement.begin_commit(b"")
        self.session.placement.finish_commit()
        return losses

    def backward_calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Returns a list that grows by the name of each backward function of a stage that is called from now on."""
        calls: list[str] = []
        for name in ("layer_backward", "lowest_layer_backward", "embed_backward"):
            real = getattr(self.session.model.functions, name)

            def counting(*args: Any, real: Any = real, name: str = name, **static: Any) -> Any:
                calls.append(name)
                return real(*args, **static)

            monkeypatch.setattr(self.session.model.functions, name, counting)
        return calls

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor or state leaf whole."""
        tensor, hash_sign, leaf = name.partition("#")
        shape = self.plan.layout.leaf_shape(tensor, hash_sign + leaf if leaf else PARAMETER)
        return self.session.placement.read(name, 0, math.prod(shape)).reshape(shape)

    def names(self) -> list[str]:
        return [tensor.name for tensor in self.plan.layout.tensors]


@contextmanager
def streamed_run(folder: Path, *overrides: str, total_steps: int = 20):
    """Yields a ``StreamedRun`` of the tiny recipe under ``overrides``, its store in ``folder``."""
    config = load_config(["tiny_random"], [f"run.dir={folder}", "offload.direct_io=optional", *overrides])
    model = open_model(config)
    data = open_data(config, model)
    plan = plan_config(config, model.config, n_examples=data.train.held)
    with ExitStack() as stack:
        arena = stack.enter_context(open_arena(plan))
        store = None
        if plan.placement == "ssd":
            store = stack.enter_context(open_store(config, plan, arena, resumed=False))
        with open_session(config, plan, arena, store, total_steps) as session:
            initialise_state(plan.layout, session.placement, model.pieces)
            train = config.train
            step_data = StepData(
                data.train,
                train.gradient_accumulation_steps,
                train.micro_batch_size,
            )
            yield StreamedRun(config, plan, session, step_data)
