# SPDX-License-Identifier: Apache-2.0
"""What a run remembers besides its tensors; committed with them, so that both are of the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from memascend_jax.errors import StoreError
from memascend_jax.optim.loss_scale import ScaleState

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after ``step`` steps.

    The schedule is a function of the step and the config, so the step is all that is kept of it; the optimizer's count
    is the step less the skipped ones. What of the data comes next is a function of the sequences read and the seed.

    Attributes:
        step: steps done; 0 after initialisation.
        config: the configuration as plain values.
        tile_elements: the plan's tile size, which the store's tensors are cut by.
        metrics_bytes: length of the metrics file that belongs to this step.
        tokens: trained tokens so far.
        scaling: the loss scale and the counters of skipped steps, as ``ScaleState`` has them; empty before a step.
        results: figures that the summary needs from before an interruption, such as ``eval_loss_before``.
        sequences: read so far, which is the place in the data; None in a state of an earlier version, that has read as
            many in every step.
        position: what streamed data needs besides to go on there, as ``TrainingSequences.position`` returns it.
        contents: digests of what the configuration only names, as ``recipes.resume`` makes them.
        run_id: of the run since it began, wherever its folder and its store are; "" in a state of an earlier version.
    """

    step: int
    config: Mapping[str, Any]
    tile_elements: int
    metrics_bytes: int = 0
    tokens: int = 0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    sequences: int | None = 0
    position: Mapping[str, Any] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    schema: int = SCHEMA

    def after(
        self,
        step: int,
        metrics_bytes: int,
        trained_tokens: int,
        scaling: ScaleState,
        *,
        sequences: int,
        position: Mapping[str, Any] | None = None,
        **results: Any,
    ) -> RunState:
        """Returns the state after one more step, that read ``sequences`` and trained on ``trained_tokens``.

        Args:
            position: of the data after it, where there is more to say than the sequences read.
        """
        return replace(
            self,
            step=step,
            metrics_bytes=metrics_bytes,
            tokens=self.tokens + trained_tokens,
            sequences=(self.sequences or 0) + sequences,
            position=position or {},
            scaling=asdict(scaling),
            results={**self.results, **results},
        )

    def with_results(self, **results: Any) -> RunState:
        """Returns the same state with more results."""
        return replace(self, results={**self.results, **results})

    def without_results(self, *names: str) -> RunState:
        """Returns the same state without some results."""
        kept = {name: value for name, value in self.results.items() if name not in names}
        return replace(self, results=kept)

    def scale_state(self) -> ScaleState | None:
        """Returns what ``scaling`` holds, or None."""
        return ScaleState(**self.scaling) if self.scaling else None

    def encode(self) -> bytes:
        """Returns the bytes that ``decode`` reads."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, store: str) -> RunState:
        """Returns the state that ``data`` holds.

        Raises:
            StoreError: the bytes are not a run's state, or a later version's.
        """
        try:
            values = json.loads(data)
            schema = values["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"the store '{store}' holds tensors, but not a training run of this program; choose another "
                "offload.store"
            ) from error
        if schema != SCHEMA:
            raise StoreError(
                f"the store '{store}' holds a run of state version {schema}, this program knows version {SCHEMA}; "
                "resume it with the version that wrote it"
            )
        known = {item.name for item in fields(cls)}
        if "sequences" not in values:
            values["sequences"] = None
        return cls(**{key: value for key, value in values.items() if key in known})


def run_facts(data: bytes) -> dict[str, Any] | None:
    """Returns what a store's description says of the run that ``data`` is of; None where it is of none."""
    try:
        found = json.loads(data)
        config, results = found["config"], found.get("results", {})
        return {
            "step": found["step"],
            "state_format": config["optimizer"]["state_format"],
            "compute_dtype": config["model"]["compute_dtype"],
            "model": config["model"]["source"],
            "run_dir": config["run"]["dir"],
            "finished": bool(results.get("finished")),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
