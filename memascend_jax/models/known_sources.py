# SPDX-License-Identifier: Apache-2.0
"""Well-known models by their names on the hub: which published shape each has. For planning without the model."""

from __future__ import annotations

#: The name of ``known_shapes`` by the lower-case name of the repository.
_SHAPES = {
    "huggingfacetb/smollm2-135m": "smollm2-135m",
    "huggingfacetb/smollm2-135m-instruct": "smollm2-135m",
    "huggingfacetb/smollm2-360m": "smollm2-360m",
    "huggingfacetb/smollm2-360m-instruct": "smollm2-360m",
    "huggingfacetb/smollm2-1.7b": "smollm2-1.7b",
    "huggingfacetb/smollm2-1.7b-instruct": "smollm2-1.7b",
    "meta-llama/llama-2-7b-hf": "llama2-7b",
    "meta-llama/llama-2-13b-hf": "llama2-13b",
    "meta-llama/llama-2-70b-hf": "llama2-70b",
    "meta-llama/meta-llama-3-8b": "llama3-8b",
    "meta-llama/meta-llama-3-8b-instruct": "llama3-8b",
    "meta-llama/meta-llama-3-70b": "llama3-70b",
    "meta-llama/meta-llama-3-70b-instruct": "llama3-70b",
    "meta-llama/llama-3.1-8b": "llama3.1-8b",
    "meta-llama/llama-3.1-8b-instruct": "llama3.1-8b",
    "meta-llama/llama-3.1-70b": "llama3.1-70b",
    "meta-llama/llama-3.1-70b-instruct": "llama3.1-70b",
    "meta-llama/llama-3.2-1b": "llama3.2-1b",
    "meta-llama/llama-3.2-1b-instruct": "llama3.2-1b",
    "meta-llama/llama-3.2-3b": "llama3.2-3b",
    "meta-llama/llama-3.2-3b-instruct": "llama3.2-3b",
    "meta-llama/llama-3.3-70b-instruct": "llama3.1-70b",
    "mistralai/mistral-7b-v0.3": "mistral-7b",
    "mistralai/mistral-7b-instruct-v0.3": "mistral-7b",
    "qwen/qwen2.5-0.5b": "qwen2.5-0.5b",
    "qwen/qwen2.5-0.5b-instruct": "qwen2.5-0.5b",
    "qwen/qwen2.5-1.5b": "qwen2.5-1.5b",
    "qwen/qwen2.5-1.5b-instruct": "qwen2.5-1.5b",
    "qwen/qwen2.5-3b": "qwen2.5-3b",
    "qwen/qwen2.5-3b-instruct": "qwen2.5-3b",
    "qwen/qwen2.5-7b": "qwen2.5-7b",
    "qwen/qwen2.5-7b-instruct": "qwen2.5-7b",
    "qwen/qwen2.5-14b": "qwen2.5-14b",
    "qwen/qwen2.5-14b-instruct": "qwen2.5-14b",
    "qwen/qwen2.5-32b": "qwen2.5-32b",
    "qwen/qwen2.5-32b-instruct": "qwen2.5-32b",
    "qwen/qwen2.5-72b": "qwen2.5-72b",
    "qwen/qwen2.5-72b-instruct": "qwen2.5-72b",
    "qwen/qwen3-0.6b": "qwen3-0.6b",
    "qwen/qwen3-1.7b": "qwen3-1.7b",
    "qwen/qwen3-4b": "qwen3-4b",
    "qwen/qwen3-8b": "qwen3-8b",
    "qwen/qwen3-14b": "qwen3-14b",
    "qwen/qwen3-32b": "qwen3-32b",
    "tinyllama/tinyllama-1.1b-chat-v1.0": "tinyllama-1.1b",
}


def shape_of_source(source: str) -> str | None:
    """Returns the name of the published shape of the repository ``source``, or None when it is not known."""
    return _SHAPES.get(source.lower())
