# SPDX-License-Identifier: Apache-2.0
"""Tiles in another state format: exact where the target has the bits, else unbiased and the same however cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from memascend_jax.optim.format_conversion import (
    ExactState,
    Rounding,
    TileState,
    convert_tile,
    decode_tile,
    encode_tile,
)
from memascend_jax.optim.state_format import (
    MASTER,
    MU,
    NU,
    SCALE_ELEMENTS,
    SCALES,
    STATE_FORMATS,
    state_format,
)

N = 5000
DRAWS = Rounding(seed=3, step=7, tensor="model.norm.weight")
FORMATS = {name: state_format(name, "bfloat16") for name in STATE_FORMATS}


def exact_state(n: int = N) -> ExactState:
    rng = np.random.default_rng(0)
    values = [(rng.standard_normal(n) * np.exp(rng.normal(0, 2, n))).astype(np.float32) for _ in range(3)]
    values[2] = np.square(values[2])
    values[0][:4] = [0.0, -0.0, np.inf, 3.4e38]
    values[1][300:400] = 0.0
    values[2][300:400] = 0.0
    return ExactState(*values)


def state_in(name: str, n: int = N) -> TileState:
    return encode_tile(FORMATS[name], exact_state(n), DRAWS)


def assert_same(left: TileState, right: TileState) -> None:
    assert left.param.tobytes() == right.param.tobytes()
    assert left.leaves.keys() == right.leaves.keys()
    for suffix, values in left.leaves.items():
        assert values.tobytes() == right.leaves[suffix].tobytes(), suffix


@pytest.mark.parametrize("name", STATE_FORMATS)
@pytest.mark.parametrize("wide", ["fp32", "split"])
def test_nothing_is_lost_on_the_way_to_a_wider_format_and_back(name: str, wide: str) -> None:
    tile = state_in(name)
    there = convert_tile(FORMATS[name], FORMATS[wide], tile, DRAWS)
    if name in ("fp32", "split"):
        assert_same(convert_tile(FORMATS[wide], FORMATS[name], there, DRAWS), tile)
    decoded, exact = decode_tile(FORMATS[wide], there), decode_tile(FORMATS[name], tile)
    for field in ("master", "mu", "nu"):
        assert getattr(decoded, field).tobytes() == getattr(exact, field).tobytes(), field


def test_every_format_has_its_leaves_in_their_types_and_lengths() -> None:
    for fmt in FORMATS.values():
        tile = encode_tile(fmt, exact_state(), DRAWS)
        assert tile.param.dtype.name == fmt.param_dtype
        assert {leaf.suffix: leaf.dtype for leaf in fmt.leaves} == {
            suffix: values.dtype.name for suffix, values in tile.leaves.items()
        }
        assert all(tile.leaves[leaf.suffix].size == leaf.values(N) for leaf in fmt.leaves)


@pytest.mark.parametrize("name", ["split_bf16", "bf16", "int8"])
def test_a_conversion_does_not_depend_on_how_a_tensor_is_cut(name: str) -> None:
    whole, exact = state_in(name), exact_state()
    cuts = [0, SCALE_ELEMENTS, 9 * SCALE_ELEMENTS, N]
    pieces = []
    for start, end in pairwise(cuts):
        part = ExactState(exact.master[start:end], exact.mu[start:end], exact.nu[start:end])
        pieces.append(encode_tile(FORMATS[name], part, Rounding(3, 7, DRAWS.tensor, start)))
    joined = {s: np.concatenate([piece.leaves[s] for piece in pieces]) for s in whole.leaves}
    assert_same(TileState(np.concatenate([piece.param for piece in pieces]), joined), whole)


def step_of(name: str, field: str, expected: np.ndarray) -> np.ndarray:
    """How far apart the neighbours of a number are at most, in a format."""
    size = np.abs(expected.astype(np.float64))
    if name == "int8" and field != "master":
        # An eighth of the number and of the lowest one, which is relative to the largest of the block.
        largest = size.reshape(-1, SCALE_ELEMENTS).max(axis=1).repeat(SCALE_ELEMENTS)
        return (size + largest * 2.0 ** (-15 if field == "mu" else -31)) / 8
    if field == "master":
        return size * {"split_bf16": 0.0, "bf16": 2.0**-7, "int8": 2.0**-15}[name]
    return size * 2.0**-7


@pytest.mark.parametrize("name", ["split_bf16", "bf16", "int8"])
def test_what_is_rounded_is_a_neighbour_each_time_and_right_in_the_mean(name: str) -> None:
    fmt, exact, rounds, n = FORMATS[name], exact_state(512), 2000, 512
    exact.master[2:4] = 1.2345, -6.789e-3
    sums = {field: np.zeros(n) for field in ("master", "mu", "nu")}
    for draw in range(rounds):
        made = decode_tile(fmt, encode_tile(fmt, exact, Rounding(0, draw, "w")))
        for field in sums:
            expected = getattr(exact, field)
            far = np.abs(getattr(made, field).astype(np.float64) - expected)
            assert (far <= step_of(name, field, expected) * 1.0001 + 1e-7 * np.abs(expected)).all(), field
            sums[field] += getattr(made, field)
    for field, total in sums.items():
        expected = getattr(exact, field).astype(np.float64)
        step = step_of(name, field, expected)
        # 4.5 deviations, for any of 512 elements, of a mean of draws that differ by a step.
        allowed = 4.5 * step / 2 / np.sqrt(rounds) + 1e-6 * np.abs(expected)
        # A nu above zero is never rounded to it: the smallest ones are too large in the mean.
        fair = np.ones(n, bool) if field != "nu" or name != "int8" else (expected == 0) | (expected > step)
        assert (np.abs(total / rounds - expected) <= allowed)[fair].all(), field


def test_the_bits_of_a_conversion_are_those_of_its_seed_step_and_tensor() -> None:
    exact = exact_state()
    kept = encode_tile(FORMATS["bf16"], exact, Rounding(0, 1, "a"))
    assert_same(encode_tile(FORMATS["bf16"], exact, Rounding(0, 1, "a")), kept)
    for other in (Rounding(1, 1, "a"), Rounding(0, 2, "a"), Rounding(0, 1, "b")):
        made = encode_tile(FORMATS["bf16"], exact, other)
        assert (made.param.view(np.uint16) != kept.param.view(np.uint16)).any()
        assert (made.leaves[MU].view(np.uint16) != kept.leaves[MU].view(np.uint16)).any()


def test_what_is_not_finite_stays_so_in_every_format() -> None:
    exact = exact_state(600)
    exact.master[:3] = np.nan, np.inf, -np.inf
    exact.mu[5] = np.nan
    for name, fmt in FORMATS.items():
        made = decode_tile(fmt, encode_tile(fmt, exact, DRAWS))
        assert np.isnan(made.master[0]), name
        assert made.master[1] == np.inf and made.master[2] == -np.inf, name
        assert np.isnan(made.mu[5]), name


def test_zero_moments_stay_zero_in_every_format() -> None:
    zeros = np.zeros(600, np.float32)
    for fmt in FORMATS.values():
        made = encode_tile(fmt, ExactState(np.ones(600, np.float32), zeros, zeros), DRAWS)
        decoded = decode_tile(fmt, made)
        assert not decoded.mu.any() and not decoded.nu.any()
        assert not made.leaves.get(SCALES, zeros).any()
        assert not made.leaves[MU].any() and not made.leaves[NU].any()
        assert MASTER not in made.leaves or (made.leaves[MASTER] == 1).all()
