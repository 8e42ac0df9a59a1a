# SPDX-License-Identifier: Apache-2.0
"""A configuration as text: the YAML that reads back equal, and every key described for ``--help``."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic.fields import FieldInfo

from memascend_jax.config.schema import Config, choices, fields, section_types


def to_dict(config: Config) -> dict[str, Any]:
    """Returns ``config`` as JSON-like values by section and key; sizes are bytes."""
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    """Returns YAML with every key, which ``load_config`` reads back to an equal configuration."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def describe_keys(width: int = 100) -> str:
    """Returns every key with its default, its choices and its sentence, for ``--help``."""
    lines: list[str] = []
    for section, kind in section_types().items():
        lines.append(f"{section}: {(kind.__doc__ or '').strip()}")
        for key, field in fields():
            if key.split(".")[0] == section:
                lines.append(f"  {key}={_default(field)}")
                lines += _wrapped(_sentence(field), width, "      ")
        lines.append("")
    return "\n".join(lines).rstrip()


def _sentence(field: FieldInfo) -> str:
    words = choices(field)
    return (field.description or "") + (f" One of {', '.join(words)}." if len(words) > 1 else "")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == ():
        return "[]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) + 1 > width and line.strip():
            lines.append(line)
            line = indent
        line += word if line == indent else f" {word}"
    return [*lines, line]


class _Dumper(yaml.SafeDumper):
    """Writes numbers so that YAML 1.1 readers also take them for numbers: 1.0e-08, not 1e-08."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}.0e{exponent}"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)
