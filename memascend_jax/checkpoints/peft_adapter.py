# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter in PEFT's layout: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

The names of its tensors are ours with ``base_model.model.`` before them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.export import Read, write_folder, write_shard
from memascend_jax.checkpoints.model_files import CONFIG, INDEX
from memascend_jax.checkpoints.safetensors_file import SafetensorsFile
from memascend_jax.checkpoints.shard_layout import Entry
from memascend_jax.errors import DataError
from memascend_jax.models.adapters import (
    ALL_LINEAR,
    Adapters,
    is_adapter,
    linear_modules,
    model_tensors,
    plan_adapters,
)
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import layer_shapes
from memascend_jax.units import counted

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_GENERATION_CONFIG = "generation_config.json"
_SHOWN = 8
#: What changes the mathematics, with the values that stand for what is computed here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    # Others (PiSSA, OLoRA, CorDA) take a part out of the model's own weights when they begin.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


def export_adapter(
    read: Read,
    dtype: str,
    config: ModelConfig,
    adapters: Adapters,
    files: Mapping[str, bytes],
    base: str | None,
    out_dir: Path,
    *,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> int:
    """Leaves a folder ``out_dir`` that PEFT loads, or, when it fails, nothing; returns its bytes.

    Args:
        read: as for ``export_huggingface``, by our names of the factors.
        dtype: our name of the factors' type.
        files: what lies beside a model's weights; that of the tokenizer is written too.
        base: what the adapter is for: a path, or the name of a repository.

    Raises:
        ConfigError, DataError, OSError: see ``export_huggingface``.
    """
    factors = [tensor for tensor in model_tensors(config, adapters) if is_adapter(tensor.name)]
    entries = [Entry(_PREFIX + tensor.name, dtype, tensor.shape) for tensor in factors]
    text = json.dumps(_peft_config(config, adapters, base), indent=2, sort_keys=True) + "\n"
    beside = {name: held for name, held in files.items() if name not in (CONFIG, INDEX, _GENERATION_CONFIG)}

    def write_weights(folder: Path) -> None:
        write_shard(
            lambda name, start, n: read(name.removeprefix(_PREFIX), start, n),
            entries,
            folder / ADAPTER_WEIGHTS,
            lambda name: on_tensor(name.removeprefix(_PREFIX)),
        )

    return write_folder(entries, {**beside, ADAPTER_CONFIG: text.encode()}, out_dir, write_weights)


class PeftAdapter:
    """The factors in an open adapter, by our names."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self.names = {_our_name(name): name for name in file.tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {ours: self._file.tensors[theirs].shape for ours, theirs in self.names.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """Returns a factor whole, in fp32."""
        theirs = self.names[name]
        parts = [values for _, values in self._file.pieces(theirs, 1 << 30)]
        wide = np.concatenate(parts).astype(np.float32)
        return wide.reshape(self._file.tensors[theirs].shape)

    def dtypes(self) -> set[str]:
        """Returns the types of the factors."""
        return {self._file.tensors[theirs].dtype for theirs in self.names.values()}

    def close(self) -> None:
        self._file.close()


def open_adapter(folder: Path, config: ModelConfig, adapters: Adapters) -> PeftAdapter:
    """Returns the adapter in ``folder``, which is one of ``adapters`` for a model of ``config``.

    Raises:
        DataError: there is none, or it is of other settings or for another model; every fault found is listed.
    """
    values = _read_config(folder)
    faults = [*_setting_faults(values, config, adapters)]
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = [entry.name for entry in folder.glob("adapter_model*") if entry.suffix in (".bin", ".pt")]
        why = f"its weights are a pickle ({pickled[0]}), which runs code when it is read" if pickled else ""
        raise _fault(folder, [why or f"it has no {ADAPTER_WEIGHTS}", *faults])
    opened = PeftAdapter(SafetensorsFile(path))
    try:
        # Of other settings every tensor would be a fault.
        faults = faults or list(_tensor_faults(opened, config, adapters))
        if faults:
            raise _fault(folder, faults)
    except BaseException:
        opened.close()
        raise
    return opened


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise _fault(
            folder, [f"it has no {ADAPTER_CONFIG}" if folder.is_dir() else "there is no such folder"]
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _fault(folder, [f"{ADAPTER_CONFIG} cannot be read: {error}"]) from error
    if not isinstance(values, dict):
        raise _fault(folder, [f"{ADAPTER_CONFIG} is not a JSON object"])
    return values


def _setting_faults(values: Mapping[str, Any], config: ModelConfig, adapters: Adapters) -> Iterator[str]:
    for key, plain in _PLAIN.items():
        if values.get(key, plain[-1]) not in plain:
            yield f"its {key} is {json.dumps(values[key])}, only {json.dumps(plain[0])} is computed here"
    for key, ours, theirs in (
        ("rank", adapters.rank, values.get("r")),
        ("alpha", adapters.alpha, values.get("lora_alpha")),
        ("rslora", adapters.rslora, bool(values.get("use_rslora", False))),
    ):
        if ours != theirs:
            yield f"lora.{key} is {_shown(ours)}, the adapter's is {_shown(theirs)}"
    targets = values.get("target_modules")
    modules = _modules_meant(targets, config)
    if modules is None:
        yield f"its target_modules are {targets!r}, expected names or a pattern"
        return
    missing = [name for name in adapters.modules if name not in modules]
    more = [name for name in modules if name not in adapters.modules]
    if missing or more:
        yield (
            f"its target_modules {json.dumps(targets)} are not those of lora.targets: "
            + "; ".join(
                f"{', '.join(names)} {what}"
                for names, what in ((missing, "only here"), (more, "only in the adapter"))
                if names
            )
        )


def _modules_meant(targets: Any, config: ModelConfig) -> list[str] | None:
    """The modules that PEFT's targets are, names or one pattern; what is none of a layer's stands for itself."""
    everything = linear_modules(layer_shapes(config))
    if targets == ALL_LINEAR:
        return list(everything)
    if isinstance(targets, str):
        with contextlib.suppress(re.error):
            return [name for name in everything if re.fullmatch(targets, f"model.layers.0.{name}")]
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return None
    found: list[str] = []
    for target in targets:
        meant = [name for name in everything if f".{name}".endswith(f".{target}")]
        found += meant or [target]
    return found


def _tensor_faults(opened: PeftAdapter, config: ModelConfig, adapters: Adapters) -> Iterator[str]:
    held = opened.shapes
    wanted = {t.name: t.shape for t in model_tensors(config, adapters) if is_adapter(t.name)}
    for name, shape in wanted.items():
        if name not in held:
            yield f"'{name}' is missing, expected {list(shape)}"
        elif held[name] != shape:
            yield f"'{name}' has shape {list(held[name])}, expected {list(shape)}"
    yield from (f"'{name}' is of no layer of this model" for name in held if name not in wanted)
    odd = opened.dtypes() - {"float32", "bfloat16", "float16"}
    if odd:
        yield f"its tensors are {', '.join(sorted(odd))}, expected float32, bfloat16 or float16"


def _peft_config(config: ModelConfig, adapters: Adapters, base: str | None) -> dict[str, Any]:
    """The contents of ``adapter_config.json``, with the keys that every version of PEFT since 0.4 reads."""
    alpha = int(adapters.alpha) if float(adapters.alpha).is_integer() else adapters.alpha
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapters.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": _short_names(config, adapters),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapters.rslora,
    }


def _short_names(config: ModelConfig, adapters: Adapters) -> list[str]:
    """The last parts of the modules' names, as they are usually given, where these mean no other module."""
    last = sorted({name.rpartition(".")[2] for name in adapters.modules})
    meant = plan_adapters(config, 1, alpha=1.0, rslora=False, targets=last)
    return last if meant.modules == adapters.modules else list(adapters.modules)


def _our_name(theirs: str) -> str:
    """The name of a factor without PEFT's prefix, and without the adapter's name that some versions leave in."""
    return theirs.removeprefix(_PREFIX).replace(".default.weight", ".weight")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _fault(folder: Path, faults: list[str]) -> DataError:
    more = f"; and {counted(len(faults) - _SHOWN, 'more', 'more')}" if len(faults) > _SHOWN else ""
    return DataError(
        f"cannot use the adapter in '{folder}' (lora.source): {'; '.join(faults[:_SHOWN])}{more}. Nothing was changed. "
        "Give the folder of a PEFT LoRA adapter for this model, and the lora keys that it was made with"
    )
