# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: typed frozen sections, read from YAML files and ``key=value`` overrides.

``load_config`` reports every fault of its input at once, each with file, line and column. Nothing here
builds anything or imports jax; the parts of the library take plain values, never a ``Config``.
"""

from memascend_jax.config.compare import CONTENT_KEYS, Change, config_digest, not_allowed, training_changes
from memascend_jax.config.load import load_config, recipe_names, recipe_path
from memascend_jax.config.schema import Config, has_store, store_paths
from memascend_jax.config.sections import (
    CheckpointSection,
    DataSection,
    LoraSection,
    ModelSection,
    OffloadSection,
    OptimizerSection,
    ParameterGroup,
    RunSection,
    TrainSection,
)
from memascend_jax.config.text import describe_keys, to_dict, to_yaml

__all__ = [
    "CONTENT_KEYS",
    "Change",
    "CheckpointSection",
    "Config",
    "DataSection",
    "LoraSection",
    "ModelSection",
    "OffloadSection",
    "OptimizerSection",
    "ParameterGroup",
    "RunSection",
    "TrainSection",
    "config_digest",
    "describe_keys",
    "has_store",
    "load_config",
    "not_allowed",
    "recipe_names",
    "recipe_path",
    "store_paths",
    "to_dict",
    "to_yaml",
    "training_changes",
]
