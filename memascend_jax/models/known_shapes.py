# SPDX-License-Identifier: Apache-2.0
"""The published shapes of well-known models, as much of their ``config.json`` as a plan needs.

For planning only: nothing is fetched. Rope settings that change no size may be left out.
Source: the ``config.json`` of each model's public repository; parameter counts are held to the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from memascend_jax.errors import DataError

_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _shape(
    model_type: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    vocab: int,
    positions: int,
    *,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **more,
    }


def _llama31(
    hidden: int, inner: int, layers: int, heads: int, *, factor: float, tied: bool = False, **more: Any
) -> dict[str, Any]:
    rope = {**_LLAMA3_ROPE, "factor": factor, "original_max_position_embeddings": 8192}
    sizes = (hidden, inner, layers, heads, 8, 128256, 131072)
    return _shape("llama", *sizes, tied=tied, rope_theta=5e5, rope_scaling=rope, **more)


def _mistral(hidden: int, inner: int, layers: int, vocab: int, positions: int, **more: Any) -> dict[str, Any]:
    sizes = (hidden, inner, layers, 32, 8, vocab, positions)
    return _shape("mistral", *sizes, rope_theta=1e6, sliding_window=None, **more)


def _gemma(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, key_value_heads: int, **more: Any
) -> dict[str, Any]:
    vocab, positions = (256000, 8192) if model_type == "gemma2" else (262144, 32768)
    sizes = (hidden, inner, layers, heads, key_value_heads, vocab, positions)
    return _shape(model_type, *sizes, tied=True, **{"head_dim": 256, "sliding_window": 4096, **more})


_SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 49152, 8192, tied=True, rope_theta=1e5),
    "smollm2-360m": _shape("llama", 960, 2560, 32, 15, 5, 49152, 8192, tied=True, rope_theta=1e5),
    "smollm2-1.7b": _shape("llama", 2048, 8192, 24, 32, 32, 49152, 8192, tied=True, rope_theta=1.3e5),
    "tinyllama-1.1b": _shape("llama", 2048, 5632, 22, 32, 4, 32000, 2048),
    "llama2-7b": _shape("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama2-13b": _shape("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama2-70b": _shape("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "llama3-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=5e5),
    "llama3-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=5e5),
    "llama3.1-8b": _llama31(4096, 14336, 32, 32, factor=8.0),
    "llama3.1-70b": _llama31(8192, 28672, 80, 64, factor=8.0),
    "llama3.1-405b": _llama31(16384, 53248, 126, 128, factor=8.0),
    "llama3.2-1b": _llama31(2048, 8192, 16, 32, factor=32.0, tied=True, head_dim=64),
    "llama3.2-3b": _llama31(3072, 8192, 28, 24, factor=32.0, tied=True, head_dim=128),
    "smollm3-3b": _shape("smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, tied=True, rope_theta=5e6),
    "mistral-7b": _mistral(4096, 14336, 32, 32768, 32768),
    "mistral-nemo-12b": _mistral(5120, 14336, 40, 131072, 131072, head_dim=128),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768, head_dim=128),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, tied=True, rope_theta=1e6),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, tied=True, rope_theta=1e6),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, tied=True, rope_theta=1e6),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rope_theta=1e6),
    "qwen2.5-14b": _shape("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768, rope_theta=1e6),
    "qwen2.5-32b": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768, rope_theta=1e6),
    "qwen2.5-72b": _shape("qwen2", 8192, 29568, 80, 64, 8, 152064, 32768, rope_theta=1e6),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-1.7b": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "qwen3-14b": _shape("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "qwen3-32b": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "gemma2-2b": _gemma("gemma2", 2304, 9216, 26, 8, 4),
    "gemma2-9b": _gemma("gemma2", 3584, 14336, 42, 16, 8),
    "gemma2-27b": _gemma("gemma2", 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma3-270m": _gemma("gemma3_text", 640, 2048, 18, 4, 1, sliding_window=512),
    "gemma3-1b": _gemma("gemma3_text", 1152, 6912, 26, 4, 1, sliding_window=512),
    "phi3-mini-4k": _shape("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
    "phi3-medium-4k": _shape("phi3", 5120, 17920, 40, 40, 10, 32064, 4096, sliding_window=2047),
    "phi4-mini": _shape("phi3", 3072, 8192, 32, 24, 8, 200064, 131072, tied=True, partial_rotary_factor=0.75),
    "phi4-14b": _shape("phi3", 5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=2.5e5),
}


def known_names() -> list[str]:
    """Returns the names of the models whose shape is known."""
    return list(_SHAPES)


def known_config(name: str) -> Mapping[str, Any]:
    """Returns the ``config.json`` of the model called ``name``, in any case.

    Raises:
        DataError: there is none of that name; lists the nearest, or all.
    """
    found = _SHAPES.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), _SHAPES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_SHAPES)}"
        raise DataError(f"no model called {name!r} is known, nor is it the path of a config.json; {hint}")
    return found
