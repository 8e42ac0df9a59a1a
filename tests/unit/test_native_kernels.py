# SPDX-License-Identifier: Apache-2.0
"""Kernels against independent oracles: optax, ml_dtypes, numpy. Bit equality between instruction sets and thread counts
is tested in native/tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from memascend_jax._native import _core

#: optax's bias corrections are compiled and may be off by an unit in the last place, which the weights take up over ten
#: steps: three units of weights up to 4 (measured 7.2e-7).
OPTAX_ATOL = 1e-6


def test_ten_steps_of_adamw_equal_optax() -> None:
    n, steps = 10_007, 10
    rng = np.random.default_rng(0)
    start = rng.standard_normal(n).astype(np.float32)
    grads = rng.standard_normal((steps, n)).astype(np.float32)
    lr, b1, b2, eps, decay = 1e-2, 0.9, 0.999, 1e-8, 0.1

    optimizer = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=decay)
    params = jnp.asarray(start)
    state = optimizer.init(params)
    master, mu, nu = start.copy(), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(steps):
        updates, state = optimizer.update(jnp.asarray(grads[step]), state, params)
        params = optax.apply_updates(params, updates)
        _core.fused_update(
            kernel="adam",
            param=master.ctypes.data,
            mu=mu.ctypes.data,
            nu=nu.ctypes.data,
            grad=grads[step].ctypes.data,
            n=n,
            grad_dtype="float32",
            lr=lr,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=decay,
            bias1=_optax_bias(b1, step + 1),
            bias2=_optax_bias(b2, step + 1),
        )
    np.testing.assert_allclose(master, np.asarray(params), rtol=0, atol=OPTAX_ATOL)
    # Eager optax rounds after every operation, as the kernel does; the moments depend on nothing else.
    np.testing.assert_array_equal(mu, np.asarray(state[0].mu))
    np.testing.assert_array_equal(nu, np.asarray(state[0].nu))


def _optax_bias(decay: float, count: int) -> float:
    """Returns the bias correction as optax rounds it in float32, which for b2 is 1e-5 off: not what is tested here."""
    return float(1 - decay ** jnp.asarray(count, jnp.int32))


def test_the_gradient_is_scaled_before_it_is_used() -> None:
    def run(grad: np.ndarray, scale: float) -> np.ndarray:
        master, mu, nu = (np.full(64, value, np.float32) for value in (1.0, 0.1, 0.2))
        _core.fused_update(
            kernel="adam",
            param=master.ctypes.data, mu=mu.ctypes.data, nu=nu.ctypes.data, grad=grad.ctypes.data, n=64,
            grad_dtype="float32", lr=0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, bias1=0.5, bias2=0.5,
            grad_scale=scale,
        )  # fmt: skip
        return master

    grad = np.linspace(-1, 1, 64, dtype=np.float32)
    np.testing.assert_array_equal(run(grad, 0.25), run(grad * np.float32(0.25), 1.0))


def test_bfloat16_differs_from_ties_to_even_only_at_ties() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    )
    values = bits.astype(np.uint32).view(np.float32).ravel()
    ours = np.empty(values.size, ml_dtypes.bfloat16)
    _core.to_bf16(ours.ctypes.data, values.ctypes.data, values.size)
    with np.errstate(invalid="ignore"):
        even = values.astype(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    assert np.isnan(ours[nan].astype(np.float32)).all()
    tie = (values.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(ours[~nan & ~tie].view(np.uint16), even[~nan & ~tie].view(np.uint16))
    upward = (values.view(np.uint32)[~nan & tie] >> 16) + 1
    np.testing.assert_array_equal(ours[~nan & tie].view(np.uint16), upward)


def test_float16_agrees_with_numpy_in_both_directions() -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(100_003) * np.exp(rng.uniform(-20, 13, 100_003))).astype(np.float32)
    halves = np.empty(values.size, np.float16)
    _core.to_f16(halves.ctypes.data, values.ctypes.data, values.size)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(halves.view(np.uint16), values.astype(np.float16).view(np.uint16))
    back = np.empty(values.size, np.float32)
    _core.to_f32(back.ctypes.data, halves.ctypes.data, halves.size, "float16")
    np.testing.assert_array_equal(back, halves.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norm_squared_agrees_with_numpy_and_sees_nonfinite(dtype: str) -> None:
    element = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    values = np.random.default_rng(2).standard_normal(70_001).astype(element)
    total, nonfinite = _core.norm_squared(values.ctypes.data, values.size, dtype)
    # Squares of halves are added in float32 four at a time.
    within = 1e-13 if dtype == "float32" else 1.2e-7
    assert total == pytest.approx(float(np.sum(values.astype(np.float64) ** 2)), rel=within)
    assert not nonfinite
    values[70_000] = np.nan
    assert _core.norm_squared(values.ctypes.data, values.size, dtype)[1]
    assert _core.norm_squared(0, 0, dtype) == (0.0, False)


def test_checksums_continue_and_take_buffers_and_addresses() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(3).integers(0, 256, 3 << 20, np.uint8)
    whole = _core.crc32c(data)
    assert _core.crc32c(data[1000:], seed=_core.crc32c(data[:1000])) == whole
    assert _core.crc32c(data.ctypes.data, data.nbytes) == whole
    cuts = np.array([0, 5, 100_000], np.int64)
    lengths = np.array([5, 99_995, data.nbytes - 100_000], np.int64)
    many = _core.crc32c_many(data.ctypes.data + cuts, lengths)
    assert many.dtype == np.uint32
    expected = [_core.crc32c(data[at : at + n]) for at, n in zip(cuts, lengths, strict=True)]
    assert many.tolist() == expected
    with pytest.raises(ValueError, match="larger than the buffer"):
        _core.crc32c(b"abc", 4)
    with pytest.raises(TypeError, match="needs nbytes"):
        _core.crc32c(data.ctypes.data)


def test_denormal_moments_are_flushed_as_xla_does() -> None:
    tiny = np.float32(1e-42)
    master, mu, nu = np.ones(8, np.float32), np.full(8, tiny), np.full(8, tiny)
    grad = np.zeros(8, np.float32)
    _core.fused_update(
        kernel="adam", param=master.ctypes.data, mu=mu.ctypes.data, nu=nu.ctypes.data, grad=grad.ctypes.data, n=8,
        grad_dtype="float32", lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, bias1=1.0, bias2=1.0,
    )  # fmt: skip
    assert not mu.any()
    assert not nu.any()
    assert not np.asarray(jax.jit(lambda x: x * 0.9)(jnp.full(8, tiny))).any()
    assert tiny * np.float32(1.0) != 0  # the caller's own mode is as before


def test_null_and_misaligned_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match="address 0"):
        _core.norm_squared(0, 4, "float32")
    data = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="not aligned"):
        _core.norm_squared(data.ctypes.data + 1, 2, "float32")
    with pytest.raises(ValueError, match="float64"):
        _core.norm_squared(data.ctypes.data, 2, "float64")


def test_the_instruction_set_can_be_named_and_an_unknown_one_is_refused() -> None:
    best = _core.cpu_isa()
    _core.use_isa("scalar")
    assert _core.cpu_isa() == "scalar"
    _core.use_isa(best)
    with pytest.raises(ValueError, match="known are"):
        _core.use_isa("sse9")
