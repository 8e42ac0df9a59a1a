# SPDX-License-Identifier: Apache-2.0
"""Every architecture computes what transformers computes: against committed values, and live where torch is installed.

Packed documents, windows shorter than a document, groups of queries, decoding with a cache, and every gradient.
"""

from __future__ import annotations

from pathlib import Path

import architecture_checks
import numpy as np
import pytest
from tiny_architectures import VARIANTS, tiny_batch

from memascend_jax.models.families import FAMILIES
from memascend_jax.models.layer_kinds import window_of
from memascend_jax.models.model_config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "architectures.npz"


@pytest.fixture(scope="module")
def golden():
    """``(logits, gradients)`` of a variant, each by name; made by ``make_architectures.py``."""
    with np.load(GOLDEN) as arrays:
        everything = dict(arrays)

    def of(variant):
        parts = []
        for kind in ("logits", "gradients"):
            prefix = f"{variant}/{kind}/"
            parts.append({k.removeprefix(prefix): v for k, v in everything.items() if k.startswith(prefix)})
        return parts

    return of


def test_every_architecture_has_a_variant():
    assert {config["model_type"] for config in VARIANTS.values()} == FAMILIES.keys()


#: What another variant has too, with another part of its code; compiling takes seconds each.
_SIMILAR = (
    "llama-linear",
    "llama-yarn-mscale",
    "smollm3-window",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3-capped-untied",
)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SIMILAR)) for name in VARIANTS]
)
def test_logits_and_gradients_are_those_of_transformers(variant, golden):
    logits, gradients = golden(variant)
    model, batch = architecture_checks.build(VARIANTS[variant]), tiny_batch()
    architecture_checks.check_logits(model, batch, logits)
    architecture_checks.check_gradients(model, batch, gradients)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_transformers_now(variant):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers_reference import reference_logits_and_gradients

    batch = tiny_batch(seed=1)
    logits, gradients = reference_logits_and_gradients(VARIANTS[variant], batch)
    model = architecture_checks.build(VARIANTS[variant])
    architecture_checks.check_logits(model, batch, logits)
    architecture_checks.check_gradients(model, batch, gradients)


def test_layers_of_different_kinds_share_an_executable():
    model, batch = architecture_checks.build(VARIANTS["gemma3"]), tiny_batch()
    assert len(model.config.kinds) == 2
    model.logits(batch.tokens, batch.positions, batch.segments)
    assert model.layer._cache_size() == 1


def test_layers_that_are_alike_take_no_kind():
    for variant in ("llama", "mistral", "phi3", "qwen2", "gemma"):
        model = architecture_checks.build(VARIANTS[variant])
        assert model.kinds == [None, None, None]


def test_a_window_longer_than_any_sequence_is_none():
    shape = ModelConfig.from_hf({**VARIANTS["mistral"], "sliding_window": 64})
    assert window_of(shape, None) is None
    assert window_of(ModelConfig.from_hf(VARIANTS["mistral"]), None) == 5


def test_generation_that_stays_short_has_the_short_form_of_longrope(golden):
    logits, _ = golden("phi4-mini")
    model, batch = architecture_checks.build(VARIANTS["phi4-mini"]), tiny_batch()
    decoded = model.decoded_logits(batch.tokens[1:, :9], 3, slots=16)
    np.testing.assert_allclose(decoded[0], logits["document.1"], rtol=0, atol=1e-4)


def test_tokens_are_decoded_one_by_one(golden):
    logits, _ = golden("gemma3")
    model, batch = architecture_checks.build(VARIANTS["gemma3"]), tiny_batch()
    decoded = model.decoded_logits(batch.tokens[:1], 1, slots=30)
    np.testing.assert_allclose(decoded[0], logits["document.0"], rtol=0, atol=1e-4)
