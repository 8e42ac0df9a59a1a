# SPDX-License-Identifier: Apache-2.0
"""The simple gradient noise scale, from the norms of micro-batches and of their sum. Pure.

A step's gradient G of N trained tokens is the sum of its micro-batches' parts g_j, of n_j tokens each. The mean
gradient of such a part, u_j = (N / n_j) g_j, scatters around the true gradient with a covariance Σ / n_j, G with Σ / N:

    A       = Σ_j (n_j / N) |u_j|² = Σ_j (N / n_j) |g_j|²      E[A]    = |true|² + M tr(Σ) / N
                                                               E[|G|²] = |true|² +   tr(Σ) / N
    tr(Σ)   ~ (A - |G|²) N / (M - 1)
    |true|² ~ (M |G|² - A) / (M - 1)
    B       = tr(Σ) / |true|²

both without bias, for M micro-batches that have trained tokens, at least two. B is in trained tokens: batches much
smaller than it waste steps, much larger ones waste tokens. Source: McCandlish et al., "An Empirical Model of
Large-Batch Training" (arXiv 1812.06162, equation 2.8 and appendix A.1), whose B_small and B_big are N / M and N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Of the running means of both estimates: a single step's ratio scatters by orders of magnitude.
_KEPT = 0.95


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """Estimates of one step, or their running means.

    Attributes:
        trace: of the covariance of one trained token's gradient; may be negative by chance.
        square: norm² of the true gradient; may be negative by chance.
    """

    trace: float = 0.0
    square: float = 0.0

    @property
    def scale(self) -> float | None:
        """The noise scale in trained tokens; None as long as an estimate is not positive."""
        return self.trace / self.square if self.trace > 0 and self.square > 0 else None

    def followed_by(self, now: NoiseEstimate) -> NoiseEstimate:
        """Returns the running means after one more step.

        They begin at 0 and are as much too small, both, after a few steps; their ratio is not.
        """
        return NoiseEstimate(
            _KEPT * self.trace + (1 - _KEPT) * now.trace, _KEPT * self.square + (1 - _KEPT) * now.square
        )


def estimate_noise(
    square: float, micro_squares: Sequence[float], micro_tokens: Sequence[float]
) -> NoiseEstimate | None:
    """Returns the estimates of one step; None when fewer than two micro-batches have trained tokens.

    Args:
        square: norm² of the step's gradient, a mean over its trained tokens.
        micro_squares: norm² of each micro-batch's part of it: they add up to the gradient, not to a mean.
        micro_tokens: trained tokens of each.
    """
    parts = [(part, n) for part, n in zip(micro_squares, micro_tokens, strict=True) if n > 0]
    count, tokens = len(parts), sum(n for _, n in parts)
    if count < 2:
        return None
    scattered = sum(tokens / n * part for part, n in parts)
    return NoiseEstimate(
        trace=(scattered - square) * tokens / (count - 1),
        square=(count * square - scattered) / (count - 1),
    )
