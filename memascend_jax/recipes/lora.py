# SPDX-License-Identifier: Apache-2.0
"""The adapters that ``lora.*`` asks for: which there are, and what they begin as. jax-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.hub_cache import HubName
from memascend_jax.checkpoints.peft_adapter import PeftAdapter, open_adapter
from memascend_jax.checkpoints.random_init import new_factor
from memascend_jax.config import Config, LoraSection
from memascend_jax.models.adapters import Adapters, is_adapter, model_tensors, plan_adapters
from memascend_jax.models.model_config import ModelConfig

Pieces = Callable[[str], Iterable[tuple[int, NDArray[Any]]]]
#: Where the default model is for those who load an adapter beside it.
_PUBLISHED = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def adapters_of(lora: LoraSection, shape: ModelConfig) -> Adapters | None:
    """Returns the adapters of a run, or None when it has none.

    Raises:
        ConfigError: a target matches nothing, or the rank is larger than a layer.
    """
    if not lora.rank:
        return None
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    return plan_adapters(shape, lora.rank, alpha=alpha, rslora=lora.rslora, targets=lora.targets)


def check_lora_source(config: Config, shape: ModelConfig, adapters: Adapters | None) -> None:
    """Returns when the adapter in ``lora.source``, if there is one, is one of this model and these settings.

    Raises:
        DataError: it is not there, or of other settings or another model; every fault found is listed.
    """
    if config.lora.source is not None and adapters is not None:
        open_adapter(Path(config.lora.source), shape, adapters).close()


class PiecesWithFactors:
    """``pieces`` of a model that gives the factors of ``adapters`` too: those of ``lora.source``, or new ones."""

    def __init__(self, config: Config, shape: ModelConfig, adapters: Adapters, pieces: Pieces) -> None:
        self._lora, self._seed = config.lora, config.train.seed
        self._shape, self._adapters, self._pieces = shape, adapters, pieces
        self._shapes = {tensor.name: tensor.shape for tensor in model_tensors(shape, adapters)}
        self._opened: PeftAdapter | None = None

    def __call__(self, name: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields ``(first element, flat values)`` of one tensor; a factor is one piece, in fp32."""
        if not is_adapter(name):
            yield from self._pieces(name)
        elif self._lora.source is None:
            yield 0, new_factor(name, self._shapes[name], self._seed, self._lora.init).reshape(-1)
        else:
            # Not before: a run that goes on has its own, and the folder may be gone.
            if self._opened is None:
                self._opened = open_adapter(Path(self._lora.source), self._shape, self._adapters)
            yield 0, self._opened.read(name).reshape(-1)

    def close(self) -> None:
        """Closes the adapter's file."""
        if self._opened is not None:
            self._opened.close()


def base_name(source: str) -> str | None:
    """Returns how an adapter's config calls the model in ``source``: as published where that is known, or by its path.

    A snapshot in the hub's cache is called by its repository.
    """
    if source == "random":
        return None
    if source in _PUBLISHED:
        return _PUBLISHED[source]
    if HubName.parse(source) is not None and not Path(source).expanduser().exists():
        return source
    path = Path(source).expanduser().resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return str(path)
