# SPDX-License-Identifier: Apache-2.0
"""Pieces of any size become exact tiles; too few or too many elements are an error."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend_jax.errors import DataError
from memascend_jax.training.initialise import cut_into_tiles


def pieces_of(values, cuts):
    bounds = [0, *sorted(cuts), len(values)]
    for begin, end in pairwise(bounds):
        yield begin, values[begin:end]


@given(
    total=st.integers(1, 200),
    size=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_tiles_hold_the_same_values_whatever_the_pieces(total, size, cuts):
    values = np.arange(total, dtype=np.float32)
    pieces = pieces_of(values, [min(cut, total) for cut in cuts])
    tiles = list(cut_into_tiles("x", pieces, total, size))
    assert [start for start, _ in tiles] == list(range(0, total, size))
    assert all(len(tile) == min(size, total - start) for start, tile in tiles)
    np.testing.assert_array_equal(np.concatenate([tile for _, tile in tiles]), values)


def test_a_tensor_that_ends_early_is_named():
    with pytest.raises(DataError, match=r"'x' ended after 7 of 8"):
        list(cut_into_tiles("x", pieces_of(np.zeros(7), []), 8, 4))


def test_a_tensor_that_goes_on_is_named():
    with pytest.raises(DataError, match=r"'x' has more than the 8"):
        list(cut_into_tiles("x", pieces_of(np.zeros(9), []), 8, 4))
