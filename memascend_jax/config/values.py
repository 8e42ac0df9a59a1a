# SPDX-License-Identifier: Apache-2.0
"""How one value of the configuration is read: from YAML text or a Python value to the field's own type.

YAML's own guesses are not used (PyYAML takes ``2e-5`` for text and ``on`` for true): a plain scalar stays
text until the type of its field says what it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from memascend_jax.config.faults import shown
from memascend_jax.units import parse_bytes

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULL = {"", "~", "null", "Null", "NULL"}
#: Stands for every key in a list of keys, as ``true`` does.
ALL = "all"
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Plain(str):
    """An unquoted YAML scalar: text whose meaning the type of its field decides."""

    __slots__ = ()


def is_null(text: str) -> bool:
    """Returns whether an unquoted scalar stands for "no value"."""
    return text in _NULL


def guess(value: Any) -> Any:
    """Returns ``value`` with plain scalars read as YAML 1.2's core schema does, for untyped keys."""
    if isinstance(value, dict):
        return {str(key): guess(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guess(item) for item in value]
    if not isinstance(value, Plain):
        return value
    if value in _BOOL:
        return _BOOL[value]
    if _INT.fullmatch(value):
        return int(value)
    return float(value) if _FLOAT.fullmatch(value) else str(value)


def _free_form(value: Any) -> Any:
    return {} if value is None else guess(value)


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, str | Path) else value


def _path(value: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    if not str(value).strip():
        raise ValueError("a path cannot be empty")
    return str(Path(value).expanduser())


def _size(value: Any) -> Any:
    if value is None or isinstance(value, float):
        return value
    if not isinstance(value, str | int):
        raise ValueError(f"expected a size such as 1.2GiB, 800MB or 4096, got {shown(value)}")
    return parse_bytes(value)


def _not_bool(value: Any) -> Any:
    # bool is an int to Python: `train.steps=True` from a caller would otherwise train one step.
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


def _key_names(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, Plain) and value in _BOOL:
        value = _BOOL[value]
    if isinstance(value, bool):
        return (ALL,) if value else ()
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        raise ValueError(
            "expected names of keys such as optimizer.learning_rate, true or [], got an empty name"
        )
    return (value,) if isinstance(value, str) else value


def _scale(value: Any) -> Any:
    if value is None or value == "dynamic":
        return value
    try:
        scale = float(_not_bool(value))
    except (TypeError, ValueError):
        raise ValueError(f"expected null, dynamic or a positive number, got {shown(value)}") from None
    if not 0 < scale < float("inf"):
        raise ValueError(f"expected null, dynamic or a positive number, got {shown(value)}")
    return scale


def _before(convert: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(convert)


Text = Annotated[str, _before(_text), Field(min_length=1)]
PathText = Annotated[str, _before(_path)]
PathList = Annotated[tuple[PathText, ...], _before(_paths)]
KeyNames = Annotated[tuple[Text, ...], _before(_key_names)]
Size = Annotated[int, _before(_size), Field(gt=0)]
Count = Annotated[int, _before(_not_bool), Field(ge=0)]
PositiveCount = Annotated[int, _before(_not_bool), Field(ge=1)]
Number = Annotated[float, _before(_not_bool), Field(allow_inf_nan=False)]
LossScale = Annotated[str | float | None, _before(_scale)]
FreeForm = Annotated[dict[str, Any], _before(_free_form)]
