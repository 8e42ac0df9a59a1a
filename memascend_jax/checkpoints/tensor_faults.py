# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the tensors of a model: all of it, said briefly. Layers that have the same fault share a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import LM_HEAD_NAME, tensor_shapes
from memascend_jax.units import counted

#: Tensors that files may hold besides the model's: computed from the config, and never read.
_LEFT_ALONE = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
#: Lines of a message; a group of layers is one.
_SHOWN = 24


class Described(Protocol):
    """A tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def shape_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the shape that the ``config.json`` of the model in ``where`` describes.

    Raises:
        DataError: it is not computed here, or impossible, with every reason.
    """
    try:
        return ModelConfig.from_hf(config)
    except DataError as error:
        reasons = str(error).removeprefix("cannot use this model config: ")
        raise DataError(f"cannot use the model in '{where}': {reasons}") from error


def check_model_tensors(
    found: Mapping[str, Described], config: ModelConfig, source: str, dtypes: Iterable[str] | None = None
) -> None:
    """Returns when ``found`` holds every tensor of the model in its shape, and none that the model does not have.

    A head beside a tied embedding is left alone, as are the frequencies of rotary positions.

    Args:
        dtypes: what tensors may be; None: anything.

    Raises:
        DataError: lists every tensor that is missing, misshapen, of another type, or too many.
    """
    if config.num_hidden_layers > len(found):
        raise DataError(
            f"cannot use the model in '{source}': its config says {config.num_hidden_layers:,} layers, but it has "
            f"{counted(len(found), 'tensor', 'tensors')} only. Fetch the model again, or correct its config.json."
        )
    expected = {tensor.name: tensor.shape for tensor in tensor_shapes(config)}
    known = None if dtypes is None else tuple(dtypes)
    faults: list[tuple[str, str, str]] = []
    for name, shape in expected.items():
        tensor = found.get(name)
        if tensor is None:
            faults.append((name, "is missing", f", expected {list(shape)}"))
        elif tuple(tensor.shape) != shape:
            faults.append((name, f"has shape {list(tensor.shape)}", f", expected {list(shape)}"))
        elif known is not None and tensor.dtype not in known:
            faults.append((name, f"is {tensor.dtype}", f", expected one of {', '.join(known)}"))
    # A tied head may have any shape: nobody reads it.
    faults += [
        (name, "is not in the model that its config describes", "")
        for name in found
        if name not in expected and name != LM_HEAD_NAME and not _LEFT_ALONE.fullmatch(name)
    ]
    if faults:
        lines = _grouped(faults)
        more = f"; and {counted(len(lines) - _SHOWN, 'more', 'more')}" if len(lines) > _SHOWN else ""
        raise DataError(
            f"cannot use the model in '{source}': {counted(len(faults), 'tensor does', 'tensors do')} not match its "
            f"config: {'; '.join(lines[:_SHOWN])}{more}. "
            "Fetch the model again, or correct its config.json."
        )


def _grouped(faults: Iterable[tuple[str, str, str]]) -> list[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, what, expected in faults:
        groups.setdefault((_NUMBER.sub("*", name), what, expected), []).append(name)
    return [_line(names, *group) for group, names in groups.items()]


def _line(names: list[str], template: str, what: str, expected: str) -> str:
    if len(names) == 1:
        return f"'{names[0]}' {what}{expected}"
    if template.count("*") == 1:
        template = template.replace("*", f"{{{_ranges(int(_NUMBER.findall(name)[0]) for name in names)}}}")
    plural = {"is": "are", "has": "have"}
    verb, _, rest = what.partition(" ")
    return f"'{template}' {plural[verb]} {rest} ({len(names):,} tensors){expected}"


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
