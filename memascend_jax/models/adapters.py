# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as tensors: which linear layers have one, and the name and shape of every factor. jax-free.

An adapter of rank r beside a weight W ``[out, in]`` is two factors, A ``[r, in]`` and B ``[out, r]``; the layer
computes ``x Wᵀ + s (x Aᵀ) Bᵀ``. The names are those that PEFT gives the modules: ``self_attn.q_proj.lora_A.weight``.

Source: Hu et al., "LoRA" (arXiv 2106.09685); the scale ``alpha / sqrt(r)``: Kalajdzievski, "rsLoRA" (arXiv 2312.03732).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from memascend_jax.errors import ConfigError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import TensorShape, layer_shapes, layer_tensor_name, tensor_shapes

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
_WEIGHT = ".weight"
_LAYER = "layer."
#: The router of a mixture of experts, which is left alone unless it is named.
_ROUTER = "gate"
#: What a target may say instead of names, as in PEFT.
ALL_LINEAR = "all-linear"
#: Adapted unless targets say otherwise, as in PEFT for the Llama family: queries and values, apart or in one.
_USUAL = ("q_proj", "v_proj", "qkv_proj")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model: the same in each layer.

    Attributes:
        modules: local names of the linear layers that have one, as ``self_attn.q_proj``, in the order of the layer.
    """

    rank: int
    alpha: float
    rslora: bool
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))

    def to_json(self) -> dict[str, Any]:
        """Returns what ``adapters_from_json`` reads."""
        return asdict(self)


def adapters_from_json(values: Mapping[str, Any]) -> Adapters:
    """Returns the adapters that ``to_json`` wrote; raises ``TypeError`` or ``KeyError`` for anything else."""
    return Adapters(
        int(values["rank"]), float(values["alpha"]), bool(values["rslora"]), tuple(values["modules"])
    )


def linear_modules(layer: Shapes) -> dict[str, tuple[int, ...]]:
    """Returns the ``[out, in]`` of a layer's linear modules, by local name."""
    return {
        name.removesuffix(_WEIGHT): shape
        for name, shape in layer.items()
        if name.endswith(_WEIGHT) and len(shape) == 2
    }


def plan_adapters(
    config: ModelConfig, rank: int, *, alpha: float, rslora: bool, targets: Sequence[str]
) -> Adapters:
    """Returns the adapters of rank ``rank`` for the linear layers that ``targets`` name.

    Args:
        targets: names of modules or their last parts, as PEFT's ``target_modules``, or regular expressions for the
            whole local name; ``all-linear``: every linear layer of a layer but the router of experts; none: queries
            and values.

    Raises:
        ConfigError: a target is found in no linear layer, with those that there are; or a layer is smaller than the
            rank; all that are found.
    """
    linears = linear_modules(layer_shapes(config))
    targets = targets or [name for name in linears if _last(name) in _USUAL] or [ALL_LINEAR]
    unknown = [target for target in targets if not any(_is_meant(target, name) for name in linears)]
    if unknown:
        raise ConfigError(
            f"lora.targets: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} found in no linear "
            f"layer of the model, whose layers have {', '.join(linears)}. Give a name, its last part (q_proj), a "
            f"regular expression that fits the whole name, or {ALL_LINEAR}"
        )
    modules = tuple(name for name in linears if any(_is_meant(target, name) for target in targets))
    small = [f"{name} {list(linears[name])}" for name in modules if rank > min(linears[name])]
    if small:
        raise ConfigError(
            f"lora.rank={rank} is more than a dimension of {', '.join(small)}: such an adapter would be larger than "
            "what it adapts. Lower lora.rank, or leave these out of lora.targets"
        )
    return Adapters(rank, alpha, rslora, modules)


def adapter_shapes(layer: Shapes, adapters: Adapters | None) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's factors by local name; none without adapters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in adapters.modules if adapters is not None else ():
        assert adapters is not None
        out_features, in_features = layer[module + _WEIGHT]
        shapes[f"{module}.{LORA_A}"] = (adapters.rank, in_features)
        shapes[f"{module}.{LORA_B}"] = (out_features, adapters.rank)
    return shapes


def model_tensors(config: ModelConfig, adapters: Adapters | None) -> list[TensorShape]:
    """Returns every tensor in forward order, a layer's factors behind its own tensors."""
    return list(_with_factors(config, adapters))


def is_adapter(name: str) -> bool:
    """Returns whether a tensor is a factor of an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def factor_names(weight: str) -> tuple[str, str]:
    """Returns the names of the factors A and B beside a weight, ``model.layers.0.self_attn.q_proj.weight``."""
    module = weight.removesuffix(_WEIGHT)
    return f"{module}.{LORA_A}", f"{module}.{LORA_B}"


def _with_factors(config: ModelConfig, adapters: Adapters | None) -> Iterator[TensorShape]:
    factors = adapter_shapes(layer_shapes(config), adapters)
    for stage, tensors in groupby(tensor_shapes(config), key=lambda tensor: tensor.stage):
        yield from tensors
        if stage.startswith(_LAYER):
            index = int(stage.removeprefix(_LAYER))
            for name, shape in factors.items():
                yield TensorShape(layer_tensor_name(index, name), shape, stage)


def _is_meant(target: str, module: str) -> bool:
    if target == ALL_LINEAR:
        return _last(module) != _ROUTER
    return f".{module}".endswith(f".{target}") or re.fullmatch(target, module) is not None


def _last(module: str) -> str:
    return module.rpartition(".")[2]
