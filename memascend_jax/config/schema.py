# SPDX-License-Identifier: Apache-2.0
"""The whole configuration, and the dotted keys by which its fields are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import model_validator
from pydantic.fields import FieldInfo

from memascend_jax.config import sections


class Config(sections.Section):
    """A validated configuration; ``Config()`` is the default recipe.

    Attributes are named as the keys: ``config.train.steps``, ``config.offload.host_memory`` (bytes or None).
    Use ``load_config`` for input of a user: it also checks the fields against each other.
    """

    model: sections.ModelSection = sections.ModelSection()
    data: sections.DataSection = sections.DataSection()
    train: sections.TrainSection = sections.TrainSection()
    lora: sections.LoraSection = sections.LoraSection()
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    offload: sections.OffloadSection = sections.OffloadSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    run: sections.RunSection = sections.RunSection()

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_default_steps(cls, data: Any) -> Any:
        train = data.get("train") if isinstance(data, dict) else None
        if isinstance(train, dict) and train.get("epochs") is not None and "steps" not in train:
            return {**data, "train": {**train, "steps": None}}
        return data


def section_types() -> dict[str, type[sections.Section]]:
    """Returns the class of each section, by its key, in the order of the documentation."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type)}


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yields every dotted key with its field, in the order of the documentation."""
    for name, kind in section_types().items():
        for key, field in kind.model_fields.items():
            yield f"{name}.{key}", field


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Returns the words that ``field`` accepts; empty when it is not a choice between words."""
    arguments = get_args(field.annotation)
    is_choice = bool(arguments) and all(isinstance(argument, str) for argument in arguments)
    return tuple(arguments) if is_choice else ()


def has_store(config: Config) -> bool:
    """Returns whether a run keeps its state in a store, from which it can go on."""
    return config.offload.placement not in ("host", "memory")


def store_paths(config: Config) -> tuple[Path, ...]:
    """Returns the paths of the run's store: ``offload.store``, or the one file in ``run.dir``."""
    if config.offload.store:
        return tuple(Path(path) for path in config.offload.store)
    return (Path(config.run.dir) / "memascend.store",)
