# SPDX-License-Identifier: Apache-2.0
"""A store's model as a Hugging Face folder, whether its run has ended or not. jax-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.config import Config
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes.inputs import open_model
from memascend_jax.storage.store_errors import dirty_store
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.run_state import RunState


def export_store(paths: Sequence[str], out: Path) -> dict[str, Any]:
    """Writes the folder ``out`` from the last committed step of the run in the store, one piece at a time.

    Returns:
        ``path`` of the folder, ``step`` and ``generation`` that it holds.

    Raises:
        StoreError: there is no store, it holds no run, or no single step: it was being overwritten in place.
        DataError: the model that the run started from is gone; its tokenizer and configuration are needed.
        ConfigError: ``out`` exists or cannot be made.
        OSError: the disk is full or fails.
    """
    with TensorStore.open(list(paths), read_only=True, direct_io="optional") as store:
        if store.dirty:
            raise dirty_store(store.paths, store.generation, store.run_state)
        state = RunState.decode(store.run_state, ", ".join(paths))
        model = open_model(Config.model_validate(state.config))
        try:
            tensors = tensor_shapes(model.config)
            dtype = store.spec(tensors[0].name).dtype
            files = model.checkpoint.export_files() if model.checkpoint else {}
            export_huggingface(store.read_elements, tensors, dtype, model.config, files, out)
        finally:
            model.close()
        return {"path": str(out), "step": state.step, "generation": store.generation}
