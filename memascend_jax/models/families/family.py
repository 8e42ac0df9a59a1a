# SPDX-License-Identifier: Apache-2.0
"""What one architecture adds to the common reader and writer of ``config.json``, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope
from memascend_jax.models.rope import TYPES, settings_of, write_rope

#: What differs from layer to layer is listed for each.
_MOST_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"

#: The keys of a ``config.json``, those that it leaves out with Hugging Face's default.
Options = Mapping[str, Any]


def one_rope(options: Options) -> dict[str, dict[str, Any]]:
    """Returns the rope settings that all layers share, under the name ``""``."""
    settings = settings_of(options)
    settings.setdefault("rope_theta", options["rope_theta"])
    if options.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = options["original_max_position_embeddings"]
    return {"": settings}


def all_alike(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    """Returns the kind of layers that see everything before them."""
    return [LayerKind(None, ropes[""])]


def nothing_more(_: Any) -> dict[str, Any]:
    """Returns no more keys or fields."""
    return {}


def no_faults(_: Options) -> Iterable[str]:
    """Returns no faults beyond those that are looked for in every architecture."""
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its ``config.json`` is read and written. The layer that computes it is common to all.

    Attributes:
        model_type, architecture: what its ``config.json`` calls it.
        describe: returns the fields of ``ModelConfig`` in which it differs from Llama.
        write: returns the keys that ``config.json`` has beside the common ones, or instead of them.
        defaults: Hugging Face's values of keys that a ``config.json`` leaves out, where they are not the common ones.
        keys: what else is read.
        fixed: options that change the mathematics, with the only value that is computed here.
        indifferent: what else its files may hold that changes nothing here.
        faults: yields what is wrong with its own options.
        ropes: returns its rope settings by name.
        kinds: returns the kind of each layer, or one of all, given the ropes by name.
        rope_types: the rope types that it may have.
        partial_rotary: ``partial_rotary_factor`` of each head is turned.
        activation: the key that names the activation.
    """

    model_type: str
    architecture: str
    describe: Callable[[Options], dict[str, Any]] = nothing_more
    write: Callable[[ModelConfig], dict[str, Any]] = nothing_more
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    indifferent: tuple[str, ...] = ()
    faults: Callable[[Options], Iterable[str]] = no_faults
    ropes: Callable[[Options], dict[str, dict[str, Any]]] = one_rope
    kinds: Callable[[Options, Mapping[str, Rope]], list[LayerKind]] = all_alike
    rope_types: tuple[str, ...] = TYPES
    partial_rotary: bool = False
    activation: str = "hidden_act"


def layer_types(options: Options, default: Callable[[int], bool]) -> list[bool]:
    """Returns whether each layer has a window: as ``layer_types`` says, or else ``default`` of its index."""
    given = options.get("layer_types")
    if given is not None:
        return [kind == SLIDING for kind in given]
    return [default(index) for index in range(options["num_hidden_layers"])]


def layer_type_faults(options: Options) -> Iterator[str]:
    """Yields what is wrong with ``layer_types``."""
    given, n_layers = options.get("layer_types"), options["num_hidden_layers"]
    if n_layers > _MOST_LAYERS:
        yield f"num_hidden_layers is {n_layers:,}, more than any model has"
        return
    if given is None:
        return
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != n_layers:
        yield f"layer_types has to be a list of {n_layers} names, one for each layer"
        return
    unknown = sorted({repr(kind) for kind in given if kind not in (FULL, SLIDING)})
    if unknown:
        yield f"layer_types has {', '.join(unknown)}; known are {FULL!r} and {SLIDING!r}"


def window_faults(options: Options, *, needed: bool) -> Iterator[str]:
    """Yields what is wrong with ``sliding_window``, which layers ask for if ``needed``."""
    window = options.get("sliding_window")
    if window is None:
        if needed:
            yield "sliding_window is missing, but layers are of type 'sliding_attention'"
    elif not is_count(window):
        yield f"sliding_window is {window!r}, expected a positive whole number"


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def cap_faults(options: Options, *keys: str) -> Iterator[str]:
    """Yields which of ``keys`` is neither null nor a positive number."""
    for key in keys:
        value = options.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            yield f"{key} is {value!r}, expected a positive number or null"


def write_layer_types(config: ModelConfig) -> list[str]:
    """Returns ``layer_types`` of ``config``."""
    return [FULL if kind.window is None else SLIDING for kind in config.kind_list()]


def write_one_rope(rope: Rope) -> dict[str, Any]:
    """Returns the keys of a rope that all layers share, for transformers of every version."""
    settings = write_rope(rope)
    keys: dict[str, Any] = {"rope_parameters": settings, "rope_theta": rope.theta}
    if rope.type != "default":
        keys["rope_scaling"] = {key: value for key, value in settings.items() if key != "rope_theta"}
    return keys
