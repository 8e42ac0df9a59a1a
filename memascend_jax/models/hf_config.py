# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face's ``config.json`` of every known architecture, refusing what is not computed here.

What architectures say differently stands in ``families``; here is what all of them say alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memascend_jax.errors import DataError
from memascend_jax.models.families import FAMILIES, Family
from memascend_jax.models.families.family import Options, is_count, write_one_rope
from memascend_jax.models.model_config import ModelConfig, number_kinds
from memascend_jax.models.rope import KEYS as ROPE_KEYS
from memascend_jax.models.rope import read_rope, rope_faults

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

#: Hugging Face's values of what a ``config.json`` leaves out, where its architecture has no others.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
}
#: Keys of which null says that there is none; of the others it says that the default is taken.
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

#: What else is read.
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "architectures",
    "model_type",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    *ROPE_KEYS,
)
#: Keys of ``config.json`` files that change nothing here. ``attention_dropout`` is accepted at any value: fine-tuning
#: here is without dropout, as inference is.
_INDIFFERENT = (
    "_name_or_path",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "auto_map",
    "dtype",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_version",
    "use_cache",
)
#: Our name of each activation by Hugging Face's.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the model that ``config`` describes; see ``ModelConfig.from_hf``."""
    faults = config_faults(config)
    if faults:
        raise DataError(f"cannot use this model config: {'; '.join(faults)}")
    family = _family_of(config)
    options = _options(family, config)
    eos = options.get("eos_token_id")
    head_dim, positions = _head_dim(options), options["max_position_embeddings"]
    rotated = _rotated(family, options)
    ropes = {name: read_rope(settings, positions) for name, settings in family.ropes(options).items()}
    fields: dict[str, Any] = {
        **{key: options[key] for key in _REQUIRED},
        "num_key_value_heads": options["num_key_value_heads"],
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": float(options["rms_norm_eps"]),
        "tie_word_embeddings": bool(options["tie_word_embeddings"]),
        "initializer_range": float(options["initializer_range"]),
        "bos_token_id": options.get("bos_token_id"),
        "eos_token_id": tuple(eos) if isinstance(eos, list | tuple) else eos,
        "pad_token_id": options.get("pad_token_id"),
        "model_type": family.model_type,
        "rotated": 0 if rotated == head_dim else rotated,
        "activation": _ACTIVATIONS[options[family.activation]],
    }
    return ModelConfig(**fields | number_kinds(family.kinds(options, ropes)) | dict(family.describe(options)))


def config_faults(config: Mapping[str, Any]) -> list[str]:
    """Returns what keeps ``config`` from being computed here, a sentence each; empty when it can be."""
    faults = _architecture_faults(config)
    if faults:
        return faults
    family = _family_of(config)
    options = _options(family, config)
    sizes = list(_size_faults(options))
    faults = [*_option_faults(family, config), *sizes, *_number_faults(config)]
    # What is said of layers and heads makes sense only where there are such.
    return faults if sizes else [*faults, *_family_faults(family, options)]


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Returns a ``config.json`` that every version of transformers reads that has the architecture.

    Rope settings are written as versions before 5 want them, too.
    """
    family, eos = FAMILIES[config.model_type], config.eos_token_id
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "head_dim": config.head_dim,
        family.activation: config.activation,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        **write_one_rope(config.global_rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **family.write(config),
    }


def known_keys(config: Mapping[str, Any]) -> frozenset[str]:
    """Returns every key that a ``config.json`` of this architecture may have; a real file may have others besides."""
    common = {*_REQUIRED, *_OPTIONAL, *_INDIFFERENT, *_DEFAULTS}
    families = FAMILIES.values() if _architecture_faults(config) else [_family_of(config)]
    for family in families:
        common |= {*family.defaults, *family.keys, *family.fixed, *family.indifferent}
    return frozenset(common)


def _family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config without faults in its names; what names nothing is Llama's."""
    if config.get("model_type"):
        return FAMILIES[config["model_type"]]
    names = _architectures(config)
    return next((family for family in FAMILIES.values() if family.architecture in names), FAMILIES["llama"])


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    listed = config.get("architectures") or []
    return list(listed) if isinstance(listed, list) else [listed]


def _architecture_faults(config: Mapping[str, Any]) -> list[str]:
    classes = {family.architecture: family for family in FAMILIES.values()}
    names, model_type = _architectures(config), config.get("model_type")
    known = ", ".join(map(repr, classes))
    part = config.get("text_config")
    if part:
        named = " / ".join(repr(name) for name in [*names, model_type] if name) or "this"
        inner = part.get("model_type") if isinstance(part, Mapping) else part
        return [
            f"{named} reads more than text, and its text_config, {inner!r}, is not known here; known are {known}"
        ]
    unknown = [repr(name) for name in names if not isinstance(name, str) or name not in classes]
    if model_type and (not isinstance(model_type, str) or model_type not in FAMILIES):
        unknown.append(repr(model_type))
    if unknown:
        # A model names itself twice, by its class and by its type.
        return [f"architecture {' / '.join(unknown)} is not known here; known are {known}"]
    differing = [name for name in names if model_type and classes[name].model_type != model_type]
    if differing:
        return [f"architecture {differing[0]!r} and model_type {model_type!r} do not go together"]
    return []


def _options(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with what it leaves out."""
    given = {key: value for key, value in config.items() if value is not None or key in _NULLABLE}
    options = {**_DEFAULTS, **family.defaults, **given}
    # Hugging Face takes null for all heads, but a key that is left out for the architecture's default.
    if "num_key_value_heads" not in options or config.get("num_key_value_heads", 0) is None:
        options["num_key_value_heads"] = options.get("num_attention_heads")
    return options


def _option_faults(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in family.fixed.items():
        if config.get(key) not in (None, value):
            only = "null" if value is None else repr(value)
            yield f"{key} is {config[key]!r}, only {only} is computed here"
    activation = _options(family, config)[family.activation]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        yield f"{family.activation} is {activation!r}, known are {', '.join(map(repr, _ACTIVATIONS))}"
    for key in ROPE_KEYS:
        if config.get(key) and not isinstance(config[key], Mapping):
            yield f"{key} is {config[key]!r}, expected keys with values"
    if "quantization_config" in config:
        yield "the weights are quantised (quantization_config): use an unquantised model"


def _size_faults(options: Options) -> Iterator[str]:
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    for key in (*_REQUIRED, *optional):
        value = options.get(key)
        if value is None:
            if key in _REQUIRED:
                yield f"{key} is missing"
        elif not is_count(value):
            yield f"{key} is {value!r}, expected a positive whole number"


def _number_faults(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rms_norm_eps", "initializer_range"):
        value = config.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
        ):
            yield f"{key} is {value!r}, expected a positive number"


def _family_faults(family: Family, options: Options) -> Iterator[str]:
    heads, groups, hidden = (
        options[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    if heads % groups:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    rotated: int | None = None
    if options.get("head_dim") is None and hidden % heads:
        yield f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
    elif _head_dim(options) % 2:
        yield f"head_dim {_head_dim(options)} is odd, rotary positions need pairs"
    else:
        share = _partial_rotary_factor(options)
        if not family.partial_rotary and share != 1.0:
            yield "partial_rotary_factor is not 1.0: rotating a part of each head is not known here"
        elif isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            yield f"partial_rotary_factor is {share!r}, expected a number above 0 and up to 1"
        elif _rotated(family, options) % 2 or not _rotated(family, options):
            yield (
                f"partial_rotary_factor {share} rotates {_rotated(family, options)} elements of a head, "
                "rotary positions need pairs"
            )
        else:
            rotated = _rotated(family, options)
    for name, settings in family.ropes(options).items():
        yield from rope_faults(settings, rotated, family.rope_types, name)
    yield from family.faults(options)


def _head_dim(options: Options) -> int:
    return int(options.get("head_dim") or options["hidden_size"] // options["num_attention_heads"])


def _partial_rotary_factor(options: Options) -> Any:
    """From the rope settings, or beside them."""
    inner = (
        options[key].get("partial_rotary_factor")
        for key in ROPE_KEYS
        if isinstance(options.get(key), Mapping)
    )
    found = next((value for value in inner if value is not None), None)
    return options.get("partial_rotary_factor", 1.0) if found is None else found


def _rotated(family: Family, options: Options) -> int:
    head_dim = _head_dim(options)
    return int(head_dim * _partial_rotary_factor(options)) if family.partial_rotary else head_dim
