# SPDX-License-Identifier: Apache-2.0
"""Kernels on any bits that hypothesis finds: conversions and checksums against numpy and the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memascend_jax._native import _core

pytestmark = pytest.mark.property

any_bits = hnp.arrays(np.uint32, st.integers(1, 200))


@given(any_bits)
def test_the_low_half_of_a_float_alone_decides_its_bfloat16(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    halves = np.empty(bits.size, np.uint16)
    _core.to_bf16(halves.ctypes.data, values.ctypes.data, values.size)
    finite_or_inf = ~np.isnan(values)
    expected = ((bits >> 16) + ((bits & 0xFFFF) >= 0x8000))[finite_or_inf]
    np.testing.assert_array_equal(halves[finite_or_inf], expected)
    back = np.empty(bits.size, np.float32)
    _core.to_f32(back.ctypes.data, halves.ctypes.data, halves.size, "bfloat16")
    assert np.isnan(back[~finite_or_inf]).all()


@given(st.binary(max_size=3000), st.integers(0, 3000), st.integers(0, 2**32 - 1))
def test_a_checksum_does_not_depend_on_where_the_data_is_cut(data: bytes, cut: int, seed: int) -> None:
    first = _core.crc32c(data[:cut], seed=seed)
    assert _core.crc32c(data[cut:], seed=first) == _core.crc32c(data, seed=seed)


@given(hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_norm_squared_is_the_sum_in_double_precision(values: np.ndarray) -> None:
    total, nonfinite = _core.norm_squared(values.ctypes.data, values.size, "float32")
    normal = np.where(np.abs(values) < np.finfo(np.float32).tiny, 0, values).astype(np.float64)
    assert total == pytest.approx(float(np.sum(normal**2)), rel=1e-12)
    assert not nonfinite
