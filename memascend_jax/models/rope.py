# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of every rope type, and the settings in a ``config.json`` that ask for them. jax-free.

Source: each type's paper, and transformers' ``modeling_rope_utils``, whose results these are: ``linear`` (position
interpolation, Chen et al., arXiv 2306.15595), ``yarn`` (Peng et al., arXiv 2309.00071), ``longrope`` (Ding et al.,
arXiv 2402.13753), ``llama3`` (the model card of Llama 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.models.model_config import Rope

TYPES = ("default", "linear", "llama3", "yarn", "longrope")

#: Where the rope settings are: since transformers 5, and before. What both say is taken from the second, as there.
KEYS = ("rope_parameters", "rope_scaling")

#: Numbers that a type must have, and those that it may have.
_NEEDED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_POSITIVE = (
    "rope_theta",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)

Settings = Mapping[str, Any]


def frequencies(rope: Rope, rotated: int, *, long: bool = False) -> NDArray[np.float32]:
    """Returns the angle of each pair of elements at position 1, float32 ``[rotated / 2]``.

    Args:
        rotated: elements of each head that are turned.
        long: for documents of more than ``rope.original_positions`` tokens (``longrope``).
    """
    exponent = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    plain = rope.theta**-exponent
    if rope.type == "linear":
        plain = plain / rope.factor
    elif rope.type == "llama3":
        plain = _llama3(rope, plain)
    elif rope.type == "yarn":
        plain = _yarn(rope, plain, rotated)
    elif rope.type == "longrope":
        plain = plain / np.asarray(rope.long_factor if long else rope.short_factor)
    return plain.astype(np.float32)


def _llama3(rope: Rope, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divides low frequencies by the factor, leaves high ones, and goes from one to the other in between."""
    turns = rope.original_positions * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: Rope, plain: NDArray[np.float64], rotated: int) -> NDArray[np.float64]:
    """The same idea as ``_llama3``, the ramp being linear in the index of the pair."""

    def pair_of(turns: float) -> float:
        share = math.log(rope.original_positions / (turns * 2 * math.pi))
        return rotated * share / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    # Without a width there would be no ramp to divide by.
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    scaled: NDArray[np.float64] = interpolated * plain / rope.factor + (1 - interpolated) * plain
    return scaled


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rope settings of a ``config.json`` as one mapping; what is no mapping is a fault of its own."""
    found: dict[str, Any] = {}
    for key in KEYS:
        if isinstance(config.get(key), Mapping):
            found |= {name: value for name, value in config[key].items() if value is not None}
    return found


def rope_type(settings: Settings) -> str:
    """Returns what the settings call their type."""
    return str(settings.get("rope_type") or settings.get("type") or "default")


def rope_faults(
    settings: Settings, rotated: int | None, known: tuple[str, ...] = TYPES, where: str = ""
) -> Iterator[str]:
    """Yields what is wrong with rope settings.

    Args:
        settings: with ``rope_theta`` and ``original_max_position_embeddings`` filled in.
        rotated: elements of each head that are turned; None where that is not known for faults of its own.
        known: the types that the architecture may have.
        where: which of several settings, such as ``full_attention``.
    """
    kind, of = rope_type(settings), f" of {where}" if where else ""
    if kind not in known:
        yield f"rope type {kind!r}{of} is not known here; known are {', '.join(map(repr, known))}"
        return
    for key in _POSITIVE:
        value = settings.get(key)
        if value is not None and not _is_positive(value):
            yield f"{key} is {value!r}{of}, expected a positive number"
    for key in _NEEDED.get(kind, ()):
        if settings.get(key) is None:
            yield f"{key} is missing{of}, rope type {kind!r} needs it"
    if kind == "llama3" and settings.get("low_freq_factor") == settings.get("high_freq_factor") is not None:
        yield f"low_freq_factor and high_freq_factor are both {settings['low_freq_factor']!r}{of}"
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        value = settings.get(key)
        if not isinstance(value, list | tuple) or not all(map(_is_positive, value)):
            yield f"{key} is {_short(value)}{of}, expected a list of positive numbers"
        elif rotated is not None and len(value) != rotated // 2:
            yield f"{key} has {len(value)} numbers{of}, expected {rotated // 2}: one for each pair of turned elements"


def read_rope(settings: Settings, positions: int) -> Rope:
    """Returns the rope of settings without faults; ``positions`` are the model's."""
    kind = rope_type(settings)
    theta = float(settings["rope_theta"])
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(settings["factor"]))
    original = int(settings.get("original_max_position_embeddings") or positions)
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            float(settings["factor"]),
            original_positions=original,
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
        )
    if kind == "yarn":
        return Rope(
            theta,
            "yarn",
            float(settings["factor"]),
            attention_factor=_yarn_attention_factor(settings),
            original_positions=original,
            beta_fast=float(settings.get("beta_fast") or 32),
            beta_slow=float(settings.get("beta_slow") or 1),
            truncate=bool(settings.get("truncate", True)),
        )
    factor = float(settings.get("factor") or positions / original)
    return Rope(
        theta,
        "longrope",
        factor,
        attention_factor=_longrope_attention_factor(settings, factor, original),
        original_positions=original,
        short_factor=tuple(map(float, settings["short_factor"])),
        long_factor=tuple(map(float, settings["long_factor"])),
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """Returns the settings of ``rope`` as ``rope_parameters`` of transformers 5 holds them."""
    settings: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.type}
    if rope.type == "default":
        return settings
    settings["factor"] = rope.factor
    if rope.type != "linear":
        settings["original_max_position_embeddings"] = rope.original_positions
    if rope.type == "llama3":
        settings |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        settings |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.type == "longrope":
        settings |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.type in ("yarn", "longrope"):
        settings["attention_factor"] = rope.attention_factor
    return settings


def _yarn_attention_factor(settings: Settings) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(settings["factor"])

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    one, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(float(one)) / scale(float(all_dims)) if one and all_dims else scale(1.0)


def _longrope_attention_factor(settings: Settings, factor: float, original: int) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
