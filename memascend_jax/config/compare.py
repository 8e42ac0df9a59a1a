# SPDX-License-Identifier: Apache-2.0
"""Whether two configurations train the same: their digest, and the keys in which they differ with both values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memascend_jax.config.schema import Config
from memascend_jax.config.sections import ParameterGroup
from memascend_jax.config.text import to_dict
from memascend_jax.config.values import ALL

#: Sections that change what is learned; where the state lives and where the run writes do not.
TRAINING_SECTIONS = ("model", "data", "train", "lora", "optimizer")
#: Keys in them that only change what is shown or measured.
_INCIDENTAL = frozenset(
    {
        "train.eval_every",
        "train.samples",
        "data.eval_sequences",
        "data.cache",
        "optimizer.log_norms",
        "optimizer.log_noise_scale",
    }
)
#: Keys that name something whose content counts, not its place: who compares the content decides.
CONTENT_KEYS = frozenset(
    {"model.source", "model.revision", "data.source", "data.sources", "data.eval_source"}
)
#: A longer run is what the earlier one is the beginning of.
_MAY_GROW = frozenset({"train.steps", "train.epochs"})


@dataclass(frozen=True, slots=True)
class Change:
    """One dotted key whose value is ``new`` and was ``old``, as JSON-like values."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} ({_shown(self.old)} → {_shown(self.new)})"

    @property
    def grows(self) -> bool:
        """Whether the run only becomes longer."""
        return self.key in _MAY_GROW and None not in (self.old, self.new) and self.new > self.old


def config_digest(config: Config) -> str:
    """Returns a SHA-256 in hex of every key that changes what is learned."""
    text = json.dumps(_training_keys(to_dict(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def training_changes(saved: Mapping[str, Any], config: Config) -> list[Change]:
    """Returns the keys that change what is learned and differ between ``saved`` and ``config``, by name.

    Args:
        saved: ``to_dict`` of the earlier configuration, or what was read back from ``run.dir/config.yaml``.
    """
    # A key that an earlier version did not have yet was as its default is.
    old = _training_keys(to_dict(Config())) | _training_keys(saved)
    new = _training_keys(to_dict(config))
    keys = sorted(old.keys() | new.keys())
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def not_allowed(changes: Sequence[Change], allowed: Sequence[str]) -> list[Change]:
    """Returns the ``changes`` that ``run.allow_changed`` does not name, by key or by a key above it."""

    def is_named(key: str) -> bool:
        return any(name == ALL or key == name or key.startswith(f"{name}.") for name in allowed)

    return [change for change in changes if not is_named(change.key)]


def _training_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _with_defaults(value) if name == "optimizer.groups" else value
        for section in TRAINING_SECTIONS
        for name, value in _flat(section, values.get(section, {}))
        if name not in _INCIDENTAL
    }


def _with_defaults(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns parameter groups with all their keys: an earlier version did not have all of them."""
    defaults = {name: field.default for name, field in ParameterGroup.model_fields.items() if name != "match"}
    return [{**defaults, **group} for group in groups]


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values under their dotted keys; those of ``model.config`` one by one."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, value


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(", ", ": "))
