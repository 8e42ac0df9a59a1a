# SPDX-License-Identifier: Apache-2.0
"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: one tensor for queries, keys and values, one for gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memascend_jax.models.families.family import Family, Options, one_rope, window_faults
from memascend_jax.models.model_config import LayerKind, ModelConfig, Rope
from memascend_jax.models.rope import rope_type

#: What earlier files call ``longrope``.
_OLDER_NAMES = ("su", "yarn")


def _describe(_: Options) -> dict[str, Any]:
    return {"fused_qkv": True, "fused_gate_up": True}


def _ropes(options: Options) -> dict[str, dict[str, Any]]:
    (settings,) = one_rope(options).values()
    if rope_type(settings) in _OLDER_NAMES:
        settings["rope_type"] = "longrope"
    return {"": settings}


def _kinds(options: Options, ropes: Mapping[str, Rope]) -> list[LayerKind]:
    return [LayerKind(options.get("sliding_window"), ropes[""])]


def _faults(options: Options) -> Iterator[str]:
    yield from window_faults(options, needed=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    rope = config.global_rope
    longer = {"original_max_position_embeddings": rope.original_positions} if rope.original_positions else {}
    return {
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "partial_rotary_factor": _share(config.rotated_size, config.head_dim),
        "sliding_window": config.window,
        **longer,
    }


def _share(part: int, whole: int) -> float:
    """Returns a number of which ``int(whole * number)`` is ``part``, whatever way it is rounded."""
    share = part / whole
    return share if int(whole * share) == part else (part + 0.5) / whole


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    describe=_describe,
    write=_write,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    keys=("sliding_window",),
    fixed={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    indifferent=("embd_pdrop", "resid_pdrop", "full_attn_mod", "interpolate_factor"),
    faults=_faults,
    ropes=_ropes,
    kinds=_kinds,
    rope_types=("default", "longrope"),
    partial_rotary=True,
)
