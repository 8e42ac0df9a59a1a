# SPDX-License-Identifier: Apache-2.0
"""Hostile safetensors files: each is refused with a clear message, or all its tensors lie inside it, side by side."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memascend_jax.checkpoints.safetensors_file import SafetensorsFile
from memascend_jax.dtypes import SAFETENSORS_NAME, to_dtype
from memascend_jax.errors import DataError

pytestmark = pytest.mark.property

DATA_BYTES = 200
#: Sizes that fit, that just do not, and that overflow what a careless reader counts in.
NUMBERS = st.one_of(
    st.integers(0, 60),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 2**70]),
)
ODD = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.lists(NUMBERS, max_size=3))
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from([*SAFETENSORS_NAME.values(), "F8_E4M3", "bf16"]), ODD),
        "shape": st.one_of(st.lists(NUMBERS, max_size=3), ODD),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), ODD),
        "more": ODD,
    },
)
#: Entries that say the same with all their fields, so that many are accepted.
RIGHT = st.builds(
    lambda dtype, n, start: {
        "dtype": SAFETENSORS_NAME[dtype],
        "shape": [n],
        "data_offsets": [start, start + n * to_dtype(dtype).itemsize],
    },
    st.sampled_from(["uint8", "bfloat16", "float32"]),
    st.integers(0, 20),
    st.integers(0, DATA_BYTES),
)
HEADER = st.dictionaries(st.text(max_size=4), st.one_of(ENTRY, RIGHT, RIGHT, ODD), max_size=5)


def check(path, content: bytes) -> bool:
    """Returns whether the file was accepted."""
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except DataError as error:
        assert str(path) in str(error)
        return False
    try:
        spans = []
        for name, tensor in file.tensors.items():
            nbytes = prod(tensor.shape) * to_dtype(tensor.dtype).itemsize
            assert 8 <= tensor.offset <= tensor.offset + nbytes <= len(content)
            joined = b"".join(values.tobytes() for _, values in file.pieces(name, 16))
            assert joined == content[tensor.offset : tensor.offset + nbytes]
            spans.append((tensor.offset, nbytes))
        spans.sort()
        assert all(first + n <= second for (first, n), (second, _) in pairwise(spans))
    finally:
        file.close()
    return True


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(header=st.one_of(HEADER, ODD), spare=st.integers(0, 7))
def test_a_header_of_any_kind_is_refused_or_right(tmp_path, header, spare) -> None:
    text = json.dumps(header).encode() + b" " * spare
    check(tmp_path / "a", struct.pack("<Q", len(text)) + text + bytes(range(DATA_BYTES)))


@FUZZ
@given(
    content=st.binary(max_size=64),
    length=st.one_of(st.none(), NUMBERS.filter(lambda n: 0 <= n < 2**64), st.integers(0, 64)),
)
def test_bytes_of_any_kind_are_refused_or_right(tmp_path, content, length) -> None:
    check(tmp_path / "a", content if length is None else struct.pack("<Q", length) + content)


@FUZZ
@given(start=st.integers(0, 400), change=st.binary(min_size=1, max_size=6))
def test_a_damaged_file_is_refused_or_right(tmp_path, start, change) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 40]},
        "b": {"dtype": "BF16", "shape": [30], "data_offsets": [40, 100]},
    }
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(100)
    assert check(tmp_path / "a", whole)
    check(tmp_path / "a", whole[:start] + change + whole[start + len(change) :])


@pytest.mark.parametrize(
    "text", [b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', b"[" * 100_000]
)
def test_names_that_occur_twice_and_deep_nesting_are_refused(tmp_path, text) -> None:
    assert not check(tmp_path / "a", struct.pack("<Q", len(text)) + text + bytes(8))
