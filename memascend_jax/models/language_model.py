# SPDX-License-Identifier: Apache-2.0
"""The language model inside a model that reads more than text: its ``config.json``, and its tensors' own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memascend_jax.models.families import FAMILIES
from memascend_jax.models.shapes import LM_HEAD_NAME

#: What is said of the whole model, and is true of its text part where that says nothing.
_INHERITED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
#: Where the text part's tensors are, by what they are called alone: in files of transformers before 4.52, and since.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the ``config.json`` of the text part of ``config``, which is ``config`` itself where it is all text.

    A text part of an architecture that is not known here is left where it is, and refused as what it is.
    """
    part = config.get("text_config")
    family = FAMILIES.get(str(part.get("model_type"))) if isinstance(part, Mapping) else None
    if family is None or not isinstance(part, Mapping):
        return config
    inherited = {key: config[key] for key in _INHERITED if config.get(key) is not None}
    return {**inherited, **part, "architectures": [family.architecture]}


def language_model_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the text part's tensors among ``names``: by what they are called alone, what they are called there."""
    found = {}
    for name in names:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            found[_PREFIXES[prefix] + name.removeprefix(prefix)] = name
        elif name == LM_HEAD_NAME:
            found[name] = name
    return found
