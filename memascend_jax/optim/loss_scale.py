# SPDX-License-Identifier: Apache-2.0
"""The factor on the loss that keeps float16 gradients in range, and the count of steps that were skipped. Pure.

A dynamic scale is halved by a step whose gradient is not finite, and doubled after ``GROWTH_STEPS`` good ones in a
row. A skipped step changes this state and nothing else. Source: Micikevicius et al., "Mixed Precision Training"
(arXiv 1710.03740, section 3.2), with the constants of PyTorch's ``GradScaler``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: What a dynamic scale begins with.
INITIAL_SCALE = 2.0**16
#: A dynamic scale stays between these: below 1 gradients would be made smaller than they are, and above the other no
#: gradient is left to save, for the smallest float16 times 2**24 is 1.
LEAST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
GROWTH_STEPS = 2000
#: More skipped steps in a row than lead from the largest scale down to the least: the scale is not what is wrong.
MOST_SKIPPED_IN_A_ROW = 32


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """What happens to the scale, and to a step whose loss or gradient is not finite.

    Attributes:
        initial: the scale that a run begins with, and keeps unless it is ``dynamic``.
        skips: such a step is skipped; else it ends the run.
    """

    initial: float = 1.0
    dynamic: bool = False
    skips: bool = False


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The scale and the counters; a run goes on with them.

    Attributes:
        value: factor on the loss of the next step.
        good_steps: since the scale last changed, or a step was skipped.
        skipped_steps: of the whole run. The optimizer's count leaves them out.
        skipped_in_a_row: up to the last step.
    """

    value: float
    good_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def after_good_step(self, policy: ScalePolicy) -> ScaleState:
        """Returns the state after a step that was applied."""
        good = self.good_steps + 1
        if policy.dynamic and good >= GROWTH_STEPS:
            return replace(self, value=min(2 * self.value, LARGEST_SCALE), good_steps=0, skipped_in_a_row=0)
        return replace(self, good_steps=good, skipped_in_a_row=0)

    def after_skipped_step(self, policy: ScalePolicy) -> ScaleState:
        """Returns the state after a step that was not."""
        return ScaleState(
            max(self.value / 2, LEAST_SCALE) if policy.dynamic else self.value,
            good_steps=0,
            skipped_steps=self.skipped_steps + 1,
            skipped_in_a_row=self.skipped_in_a_row + 1,
        )


def scale_policy(loss_scale: str | float | None, *, float16: bool, skip_nonfinite: bool) -> ScalePolicy:
    """Returns the policy of a configuration.

    Args:
        loss_scale: ``dynamic``, a number, or None: dynamic for ``float16``, where gradients would vanish without, and
            none otherwise.
    """
    if not float16:
        return ScalePolicy(skips=skip_nonfinite)
    if isinstance(loss_scale, float | int):
        return ScalePolicy(float(loss_scale), skips=True)
    return ScalePolicy(INITIAL_SCALE, dynamic=True, skips=True)


def first_scale(policy: ScalePolicy, kept: ScaleState | None = None) -> ScaleState:
    """Returns what a run begins with, or goes on with from the state it ``kept``; a fixed scale is the policy's."""
    if kept is None:
        return ScaleState(policy.initial)
    return kept if policy.dynamic else replace(kept, value=policy.initial)
