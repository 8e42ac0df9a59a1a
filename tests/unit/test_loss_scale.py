# SPDX-License-Identifier: Apache-2.0
"""The loss scale: halved by a step that overflows, doubled after many good ones, kept by a run that goes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memascend_jax.models.matmul import round_to
from memascend_jax.optim.loss_scale import (
    GROWTH_STEPS,
    LARGEST_SCALE,
    ScalePolicy,
    ScaleState,
    first_scale,
    scale_policy,
)
from memascend_jax.training.run_state import RunState

DYNAMIC = scale_policy("dynamic", float16=True, skip_nonfinite=False)


def after_good_steps(state: ScaleState, policy: ScalePolicy, n: int) -> ScaleState:
    for _ in range(n):
        state = state.after_good_step(policy)
    return state


def test_an_overflow_halves_the_scale_and_is_counted() -> None:
    state = after_good_steps(first_scale(DYNAMIC), DYNAMIC, 5).after_skipped_step(DYNAMIC)
    assert state == ScaleState(2.0**15, good_steps=0, skipped_steps=1, skipped_in_a_row=1)
    state = state.after_skipped_step(DYNAMIC).after_good_step(DYNAMIC)
    assert state == ScaleState(2.0**14, good_steps=1, skipped_steps=2, skipped_in_a_row=0)


def test_the_scale_is_doubled_after_2000_good_steps_in_a_row() -> None:
    almost = after_good_steps(first_scale(DYNAMIC), DYNAMIC, GROWTH_STEPS - 1)
    assert almost.value == 2.0**16
    assert almost.after_good_step(DYNAMIC) == ScaleState(2.0**17)
    interrupted = after_good_steps(almost.after_skipped_step(DYNAMIC), DYNAMIC, GROWTH_STEPS - 1)
    assert interrupted.value == 2.0**15


def test_the_scale_has_bounds() -> None:
    least, largest = ScaleState(1.0), ScaleState(LARGEST_SCALE, good_steps=GROWTH_STEPS - 1)
    assert least.after_skipped_step(DYNAMIC).value == 1.0
    assert largest.after_good_step(DYNAMIC).value == LARGEST_SCALE


def test_a_fixed_scale_stays() -> None:
    fixed = scale_policy(512.0, float16=True, skip_nonfinite=False)
    assert fixed.skips
    state = first_scale(fixed).after_skipped_step(fixed)
    assert after_good_steps(state, fixed, GROWTH_STEPS).value == 512.0


def test_the_policy_of_a_configuration() -> None:
    assert scale_policy(None, float16=True, skip_nonfinite=False) == DYNAMIC
    assert scale_policy(None, float16=False, skip_nonfinite=False) == ScalePolicy()
    assert scale_policy(None, float16=False, skip_nonfinite=True) == ScalePolicy(skips=True)


def test_a_run_goes_on_with_its_scale_and_counters() -> None:
    kept = ScaleState(2.0**11, 7, 5, 0)
    state = RunState(0, {}, 4096).after(3, 10, 100, kept, sequences=4)
    back = RunState.decode(state.encode(), "store").scale_state()
    assert first_scale(DYNAMIC, back) == kept
    fixed = scale_policy(8.0, float16=True, skip_nonfinite=False)
    assert first_scale(fixed, back) == ScaleState(8.0, 7, 5, 0)


def test_the_state_of_a_run_from_before_there_were_scales_is_read() -> None:
    old = b'{"config":{},"metrics_bytes":1,"results":{},"schema":1,"step":2,"tile_elements":4096,"tokens":3}'
    state = RunState.decode(old, "store")
    assert (state.step, state.scale_state(), state.sequences) == (2, None, None)


def test_compiling_rounds_to_float16_as_numpy_does() -> None:
    """Also where a value is widened again, of which XLA may drop the rounding and so the overflow."""
    rng = np.random.default_rng(0)
    edges = [65503, 65519, 65520, -7e4, np.inf, np.nan, 0, -0.0, 2**-24, 2**-25, 3 * 2**-26, 2**-14 - 2**-26]
    values = np.float32([*rng.standard_normal(20_000) * 10.0 ** rng.integers(-9, 6, 20_000), *edges])

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rounded = round_to(x, jnp.float16)
        return rounded, rounded.astype(jnp.float32)

    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    for got in jax.jit(both)(values):
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("value", [3e-6, 1e-3, 2.0])
def test_the_gradient_of_rounding_to_float16_is_that_of_no_rounding(value: float) -> None:
    """Also among the denormals, where values are rounded to multiples."""
    slope = jax.jit(jax.grad(lambda x: round_to(x, jnp.float16).astype(jnp.float32) * 3.0))
    assert slope(jnp.float32(value)) == 3.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_gradient_that_overflows_when_rounded_is_in_its_norm(dtype: jnp.dtype) -> None:
    from memascend_jax.training.stage_functions import _norm_squared

    largest = float(jnp.finfo(dtype).max)
    norm = jax.jit(lambda grad: _norm_squared(round_to(grad, dtype)))
    assert np.isfinite(norm(jnp.full(3, 3.0)))
    assert not np.isfinite(norm(jnp.float32([1.0, largest * 1.002, 2.0])))
