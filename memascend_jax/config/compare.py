# SPDX-License-Identifier: Apache-2.0
"""Whether two configurations train the same: their digest and the keys in which they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from memascend_jax.config.schema import Config
from memascend_jax.config.text import to_dict

#: Sections that change what is learned; where the state lives and where the run writes do not.
TRAINING_SECTIONS = ("model", "data", "train", "optimizer")
#: Keys in them that only change what is shown or measured.
_INCIDENTAL = frozenset({"train.eval_every", "train.samples", "data.eval_sequences"})


def config_digest(config: Config) -> str:
    """Returns a SHA-256 in hex of every key that changes what is learned."""
    text = json.dumps(_training_keys(to_dict(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changed_keys(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Returns the dotted keys that change what is learned and differ between ``saved`` and ``config``.

    Args:
        saved: ``to_dict`` of the earlier configuration, or what was read back from ``run.dir/config.yaml``.
    """
    # A key that an earlier version did not have yet was as its default is.
    old = _training_keys(to_dict(Config())) | _training_keys(saved)
    new = _training_keys(to_dict(config))
    return [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]


def _training_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section in TRAINING_SECTIONS
        for key, value in values.get(section, {}).items()
        if f"{section}.{key}" not in _INCIDENTAL
    }
