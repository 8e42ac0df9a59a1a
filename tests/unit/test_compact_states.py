# SPDX-License-Identifier: Apache-2.0
"""Compact states: stochastic rounding has the right mean, moments follow fp32, masters come back. Bit equality between
instruction sets, threads and cuts is tested in native/tests."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from memascend_jax._native import _core
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import ConfigError
from memascend_jax.optim.adamw import AdamW, Draws, TileMemory, UpdateScale, draw_key, update_tile
from memascend_jax.optim.rounding import join_master, split_master
from memascend_jax.optim.state_format import MASTER, MU, NU, SCALE_ELEMENTS, STATE_FORMATS, state_format

COMPACT = [name for name in STATE_FORMATS if name != "fp32"]
DRAWS = 10_000_000


class TileState:
    """One tile of a parameter in a format, and what its moments decode to."""

    def __init__(self, name: str, masters: np.ndarray) -> None:
        self.format = state_format(name, "bfloat16")
        self.param, kept = split_master(self.format, masters.astype(np.float32))
        self.leaves = {
            leaf.suffix: kept.get(leaf.suffix, np.zeros(leaf.values(masters.size), to_dtype(leaf.dtype)))
            for leaf in self.format.leaves
        }

    def update(self, grad: np.ndarray, step: int, hyper: AdamW, learning_rate: float = 1e-4) -> None:
        addresses = {suffix: array.ctypes.data for suffix, array in self.leaves.items()}
        rounded = grad.astype(ml_dtypes.bfloat16)
        memory = TileMemory(self.param.ctypes.data, rounded.ctypes.data, addresses, grad.size)
        scale = UpdateScale(step, learning_rate, 1.0)
        draws = Draws(draw_key(0, step, "w"))
        update_tile(self.format, memory, hyper, scale, draws, weight_decay=0.0)

    def moment(self, suffix: str) -> np.ndarray:
        """The moment as float64, by the definition of the format."""
        stored = self.leaves[suffix]
        if self.format.name != "int8":
            return stored.astype(np.float64)
        pairs = self.leaves["#scales"].reshape(-1, 2).astype(np.float64)
        scales = np.repeat(pairs[:, 0 if suffix == MU else 1], SCALE_ELEMENTS)[: stored.size]
        codes = stored.astype(np.int64)
        lowest = -15 if suffix == MU else -31
        magnitude = codes & 0x7F if suffix == MU else codes
        exponent, fraction = magnitude // 8, magnitude % 8
        value = (1 + fraction / 8) * 2.0 ** (exponent + lowest) - 2.0**lowest
        return scales * value * np.where((suffix == MU) & (codes > 0x7F), -1, 1)

    def masters(self) -> np.ndarray:
        if self.format.has_master:
            return self.leaves[MASTER]
        return join_master(self.format, self.param, self.leaves.get("#residual"))


@pytest.mark.parametrize("name", COMPACT)
@pytest.mark.parametrize("course", ["constant", "vanishing", "noisy"])
def test_nu_follows_that_of_fp32_over_5000_steps(name: str, course: str) -> None:
    n, steps = 4096, 5000
    rng = np.random.default_rng(0)
    # A byte's nu of noisy gradients varies by a fifth: the sum must not be that of a few large ones.
    size = np.exp(rng.normal(0.0, 0.5 if course == "noisy" else 1.0, n)) * 1e-3
    states = TileState(name, np.zeros(n)), TileState("fp32", np.zeros(n))
    for step in range(1, steps + 1):
        if course == "constant":
            grad = size
        elif course == "vanishing":
            grad = size if step <= 500 else np.zeros(n)
        else:
            grad = size * rng.standard_normal(n)
        for state in states:
            state.update(grad, step, AdamW())
    ours, exact = (state.moment(NU) for state in states)
    assert exact.min() > 0
    assert ours.sum() / exact.sum() == pytest.approx(1, abs=0.02)
    # Not only the largest: the mean of the ratios too.
    assert (ours / exact).mean() == pytest.approx(1, abs=0.02)


def test_nearest_rounding_would_fail_that_test() -> None:
    nu = np.full(4, 1e-6, ml_dtypes.bfloat16)
    for _ in range(5000):
        nu = (np.float32(0.999) * nu.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert (nu == np.float32(1e-6).astype(ml_dtypes.bfloat16)).all()


def _share_above(values: np.ndarray, key: int, first: int = 0) -> np.ndarray:
    rounded = np.empty(values.size, np.uint16)
    _core.to_bf16_stochastic(rounded.ctypes.data, values.ctypes.data, values.size, first, key)
    return rounded


@pytest.mark.parametrize("share", [0.0, 1 / 65536, 0.1, 0.5, 0.77, 65535 / 65536])
def test_rounding_to_bfloat16_is_unbiased_within_three_sigma(share: float) -> None:
    low = round(share * 65536)
    value = np.uint32(0x3F810000 | low).view(np.float32)
    rounded = _share_above(np.full(DRAWS, value), key=draw_key(1, 2, "w"))
    ups = int((rounded == 0x3F82).sum())
    assert ups + int((rounded == 0x3F81).sum()) == DRAWS
    p = low / 65536
    assert abs(ups - DRAWS * p) <= 3 * math.sqrt(DRAWS * p * (1 - p)) + (p > 0)


def test_rounding_does_not_depend_on_cuts_threads_or_instruction_set() -> None:
    values = np.random.default_rng(1).standard_normal(1_000_003).astype(np.float32)
    key, threads, best = draw_key(3, 4, "w"), _core.threads(), _core.cpu_isa()
    whole = _share_above(values, key)
    cuts = [0, 1, 7, 4096, 500_000, values.size]
    pieces = [_share_above(values[a:b].copy(), key, a) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    try:
        for n in (1, 3):
            _core.set_threads(n)
            np.testing.assert_array_equal(_share_above(values, key), whole)
        _core.use_isa("scalar")
        np.testing.assert_array_equal(_share_above(values, key), whole)
    finally:
        _core.set_threads(threads)
        _core.use_isa(best)
    assert (_share_above(values, key + 1) != whole).any()


@pytest.mark.parametrize("name", COMPACT)
def test_what_an_update_stores_has_the_mean_of_what_it_computes(name: str) -> None:
    """One step from nothing, many times over: every stored number is known exactly, its mean within three sigma."""
    n, rounds = 512, 4000
    rng = np.random.default_rng(2)
    grad = (
        (rng.standard_normal(n) * np.exp(rng.normal(0, 2, n))).astype(ml_dtypes.bfloat16).astype(np.float64)
    )
    start = rng.standard_normal(n).astype(ml_dtypes.bfloat16).astype(np.float32)
    hyper = AdamW(b1=0.9, b2=0.99)
    exact = TileState("fp32", start)
    exact.update(grad, 1, hyper, 1e-3)
    sums = {leaf: np.zeros((2, n)) for leaf in (MU, NU, "master")}
    for step in range(rounds):
        state = TileState(name, start)
        scale, draws = UpdateScale(1, 1e-3, 1.0), Draws(draw_key(5, step, "w"))
        addresses = {suffix: array.ctypes.data for suffix, array in state.leaves.items()}
        rounded = grad.astype(ml_dtypes.bfloat16)
        memory = TileMemory(state.param.ctypes.data, rounded.ctypes.data, addresses, n)
        update_tile(state.format, memory, hyper, scale, draws, weight_decay=0.0)
        for leaf, value in ((MU, state.moment(MU)), (NU, state.moment(NU)), ("master", state.masters())):
            sums[leaf] += np.stack([value, value.astype(np.float64) ** 2])
    expected = {MU: exact.moment(MU), NU: exact.moment(NU), "master": exact.masters().astype(np.float64)}
    for leaf, (total, squares) in sums.items():
        mean = total / rounds
        deviation = np.sqrt(np.maximum(squares / rounds - mean**2, 0) / rounds)
        if leaf == NU and name == "int8":
            # Below the smallest code nothing is rounded to nothing.
            keep = expected[leaf] > expected[leaf].max() * 1e-9
        else:
            keep = np.ones(n, bool)
        off = (mean - expected[leaf])[keep]
        # Of so many numbers some are more than three sigma off: their sum must not be.
        assert np.abs(off).max() <= 6 * deviation[keep].max() + 1e-6 * np.abs(expected[leaf]).max()
        total_sigma = math.sqrt(float((deviation[keep] ** 2).sum()))
        assert abs(float(off.sum())) <= 3 * total_sigma + 1e-6 * float(np.abs(expected[leaf]).sum())


@pytest.mark.parametrize("name", COMPACT)
def test_masters_come_back_from_parameter_and_residual(name: str) -> None:
    rng = np.random.default_rng(3)
    masters = (rng.standard_normal(10_000) * np.exp(rng.normal(0, 5, 10_000))).astype(np.float32)
    fmt = state_format(name, "bfloat16")
    param, kept = split_master(fmt, masters)
    back = join_master(fmt, param, kept.get("#residual"))
    bits = {"split": 32, "split_bf16": 32, "bf16": 16, "int8": 24}[name]
    if bits == 32:
        np.testing.assert_array_equal(back, masters)
    else:
        # Half of the last bit of a significand that has 8 bits less than the number, the implicit one counted.
        assert np.max(np.abs(back / masters - 1)) <= 2.0 ** -(bits - 8)
    # What the forward reads is the nearest bfloat16, ties away, of what is kept.
    expected, _ = split_master(state_format("fp32", "bfloat16"), back)
    np.testing.assert_array_equal(param.view(np.uint16), expected.view(np.uint16))


def test_a_nan_stays_one_and_an_infinity_too() -> None:
    masters = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    for name in COMPACT:
        fmt = state_format(name, "bfloat16")
        param, kept = split_master(fmt, masters)
        np.testing.assert_array_equal(join_master(fmt, param, kept.get("#residual")), masters)


def test_the_native_block_of_scales_is_the_one_that_is_planned() -> None:
    assert SCALE_ELEMENTS == _core.BLOCK_ELEMENTS


def test_formats_that_do_not_go_with_the_compute_dtype_are_refused() -> None:
    for name in COMPACT:
        for dtype in ("float16", "float32"):
            with pytest.raises(ConfigError, match=f"state_format={name}"):
                state_format(name, dtype)
    with pytest.raises(ConfigError, match="known are fp32, split, split_bf16, bf16, int8"):
        state_format("int4", "bfloat16")
    assert state_format("fp32", "float16").param_dtype == "float16"


def test_scales_are_padded_to_whole_blocks_in_tensors_of_several_tiles() -> None:
    leaf = state_format("int8", "bfloat16").leaf("#scales")
    assert (leaf.values(1), leaf.values(256), leaf.values(257)) == (2, 2, 4)
    assert leaf.stride(4096) == 1024
    assert leaf.total(4096, 4096) == 32
    assert leaf.total(4097, 4096) == 1024 + 2
    assert leaf.span(0, 4097, 4096) == (0, 1024)
    assert leaf.span(1, 4097, 4096) == (1024, 2)
