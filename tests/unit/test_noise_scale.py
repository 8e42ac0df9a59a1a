# SPDX-License-Identifier: Apache-2.0
"""The noise scale's estimates are unbiased, whatever the tokens of each micro-batch, and their means go on."""

from __future__ import annotations

import numpy as np
import pytest

from memascend_jax.config import load_config
from memascend_jax.errors import ConfigError
from memascend_jax.optim.noise_scale import NoiseEstimate, estimate_noise
from memascend_jax.training.gradient_facts import noise_facts, norm_facts

TRIALS = 20_000


@pytest.mark.parametrize("tokens", [(8, 8), (4, 4, 4, 4), (2, 30), (5, 0, 9, 1)])
def test_both_estimates_are_right_on_average(tokens: tuple[int, ...]) -> None:
    random = np.random.default_rng(7)
    true, spread = np.linspace(-1, 1, 12), np.linspace(0.5, 3, 12)
    n = np.array(tokens, float)
    noise = random.standard_normal((TRIALS, len(tokens), 12)) * spread * np.sqrt(n)[:, None]
    # A micro-batch's part: the sum of its tokens' gradients over all tokens of the step.
    parts = (n[:, None] * true + noise) / n.sum()
    squares, micro = (parts.sum(axis=1) ** 2).sum(axis=1), (parts**2).sum(axis=2)
    found = [estimate_noise(squares[i], micro[i].tolist(), tokens) for i in range(TRIALS)]
    traces = np.array([estimate.trace for estimate in found if estimate is not None])
    norms = np.array([estimate.square for estimate in found if estimate is not None])
    for values, expected in ((traces, (spread**2).sum()), (norms, (true**2).sum())):
        assert abs(values.mean() - expected) < 4 * values.std() / np.sqrt(TRIALS)


def test_for_equal_micro_batches_it_is_the_estimate_of_the_paper() -> None:
    """Appendix A.1 with B_small = N / M and B_big = N."""
    big, small = 2.0, np.array([9.0, 5.0, 7.0, 3.0])
    found = estimate_noise(big, small / 16, [10.0] * 4)
    assert found is not None
    assert found.square == pytest.approx((40 * big - 10 * small.mean()) / (40 - 10))
    assert found.trace == pytest.approx((small.mean() - big) / (1 / 10 - 1 / 40))
    assert found.scale == found.trace / found.square


def test_one_micro_batch_with_tokens_estimates_nothing() -> None:
    assert estimate_noise(1.0, [1.0, 0.0], [5.0, 0.0]) is None
    assert NoiseEstimate(1.0, -1.0).scale is None and NoiseEstimate(-1.0, 1.0).scale is None


def test_the_means_go_on_from_what_the_state_keeps() -> None:
    facts, kept = noise_facts(NoiseEstimate(8.0, 2.0), None)
    assert facts == {"noise_trace": 8.0, "noise_grad_square": 2.0, "noise_scale": pytest.approx(4.0)}
    facts, kept = noise_facts(NoiseEstimate(2.0, 2.0), kept["noise"])
    assert facts["noise_scale"] == pytest.approx((0.95 * 8 + 2) / (0.95 * 2 + 2))
    assert noise_facts(None, kept["noise"]) == ({}, {})


def test_norms_have_a_place_for_every_layer() -> None:
    assert norm_facts(None, 3) == {}
    assert norm_facts({"layer.1": 0.123456, "head": 2.0}, 3) == {
        "grad_norms": {"embed": None, "layers": [None, 0.1235, None], "head": 2.0}
    }


def test_the_noise_scale_needs_two_micro_batches() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps of 2 or more, not 1"):
        load_config([], ["optimizer.log_noise_scale=true", "train.gradient_accumulation_steps=1"])
