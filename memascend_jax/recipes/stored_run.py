# SPDX-License-Identifier: Apache-2.0
"""The run that a store holds, for the commands that look at it or change it while it does not run. jax-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memascend_jax.config import Config
from memascend_jax.errors import StoreError
from memascend_jax.optim.state_format import StateFormat, state_format
from memascend_jax.storage.store_errors import dirty_store
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.run_state import RunState


@contextmanager
def open_committed(paths: Sequence[str]) -> Iterator[TensorStore]:
    """Yields the store at ``paths``, read-only, in a generation that is whole; nobody writes it meanwhile.

    Raises:
        StoreError: it is no store, in use, or was being overwritten in place.
    """
    with TensorStore.open(list(paths), read_only=True, direct_io="optional") as store:
        if store.dirty:
            raise dirty_store(store.paths, store.generation, store.run_state)
        yield store


def run_of(store: TensorStore) -> RunState:
    """Returns the run in ``store``.

    Raises:
        StoreError: it holds none: nothing yet, a model, the state of ``memascend_jax.offload``, or something else.
    """
    name = ", ".join(store.paths)
    if store.generation == 0:
        raise StoreError(f"the store '{name}' holds nothing yet: what began to fill it was interrupted")
    if store.records.committed:
        raise StoreError(
            f"the store '{name}' holds the state of memascend_jax.offload, not a training run: its arrays have the "
            "types that the optax transform gives them, in no state format"
        )
    return RunState.decode(store.run_state, name)


def format_of(state: RunState) -> StateFormat:
    """Returns the state format of a run."""
    model, optimizer = state.config["model"], state.config["optimizer"]
    return state_format(optimizer["state_format"], compute_dtype(model["compute_dtype"]))


def compute_dtype(configured: str) -> str:
    """Returns what ``model.compute_dtype`` stands for; ``auto`` is bfloat16."""
    return "bfloat16" if configured == "auto" else configured


def config_of(state: RunState) -> Config:
    """Returns the configuration of a run."""
    return Config.model_validate(dict(state.config))


def without_data(config: Config) -> Config:
    """Returns the configuration with random data: what is trained on does not matter here, and may be gone."""
    return config.model_copy(
        update={"data": config.data.model_copy(update={"source": "random", "sources": (), "seq_len": 2})}
    )


def with_config(state: RunState, **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the run's configuration as plain values, with keys of ``sections`` replaced."""
    changed = {name: {**state.config[name], **values} for name, values in sections.items()}
    return {**state.config, **changed}
