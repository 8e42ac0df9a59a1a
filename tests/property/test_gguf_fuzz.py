# SPDX-License-Identifier: Apache-2.0
"""Hostile GGUF files: each is refused with a clear message, or all its tensors lie inside it."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_gguf

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.checkpoints.gguf_tensors import check_places
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import DataError

pytestmark = pytest.mark.property

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.one_of(
    st.integers(0, 40), st.sampled_from([2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
)
SMALL = st.one_of(st.integers(0, 14), st.integers(0, 2**32 - 1))


def text(content: bytes, nbytes: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if nbytes is None else nbytes) + content


TEXT = st.builds(text, st.binary(max_size=12), st.one_of(st.none(), st.none(), NUMBERS))
VALUE = st.one_of(
    st.builds(lambda kind, content: struct.pack("<I", kind) + content, SMALL, st.binary(max_size=10)),
    st.builds(lambda content: struct.pack("<I", 8) + content, TEXT),
    st.builds(
        lambda kind, count, content: struct.pack("<IIQ", 9, kind, count) + content,
        SMALL,
        NUMBERS,
        st.binary(max_size=20),
    ),
)
KEY = st.one_of(TEXT, st.sampled_from([text(b"general.alignment"), text(b"general.architecture")]))
ENTRY = st.builds(lambda key, value: key + value, KEY, VALUE)
TENSOR = st.builds(
    lambda name, shape, count, kind, offset: (
        name
        + struct.pack("<I", len(shape) if count is None else count)
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    ),
    TEXT,
    st.lists(NUMBERS, max_size=4),
    st.one_of(st.none(), st.none(), st.integers(0, 2**32 - 1)),
    SMALL,
    NUMBERS,
)


def check(path, content: bytes) -> None:
    path.write_bytes(content)
    file = PositionedFile(path)
    try:
        header = GgufHeader(file)
        check_places(file, header)
    except DataError as error:
        assert len(str(error)) < 3000
        return
    finally:
        file.close()
    assert all(header.end <= place.offset <= len(content) for place in header.tensors)


@FUZZ
@given(
    version=st.one_of(st.sampled_from([2, 3, 3, 3]), SMALL),
    tensors=st.lists(TENSOR, max_size=4),
    entries=st.lists(ENTRY, max_size=4),
    counts=st.one_of(st.none(), st.none(), st.tuples(NUMBERS, NUMBERS)),
)
def test_a_header_of_any_kind_is_refused_or_right(tmp_path, version, tensors, entries, counts) -> None:
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)
    check(tmp_path / "a", head + b"".join(entries) + b"".join(tensors) + bytes(200))


@FUZZ
@given(content=st.binary(max_size=80))
def test_bytes_of_any_kind_are_refused_or_right(tmp_path, content) -> None:
    check(tmp_path / "a", b"GGUF" + content)


_WHOLE: list[tuple[bytes, int]] = []


def whole(folder) -> tuple[bytes, int]:
    """A model, made once, and where its header ends."""
    if not _WHOLE:
        config = hf_config(num_hidden_layers=1)
        path = write_gguf(folder / "m.gguf", config, random_tensors(config))
        _WHOLE.append((path.read_bytes(), GgufHeader(PositionedFile(path)).end))
    return _WHOLE[0]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.floats(0, 1), change=st.binary(min_size=1, max_size=8))
def test_a_damaged_model_is_refused_or_whole(tmp_path, start, change) -> None:
    content, end = whole(tmp_path)
    # The first bytes say that it is a GGUF file, and not a store.
    at = 4 + int(start * (end - 4))
    (tmp_path / "a").write_bytes(content[:at] + change + content[at + len(change) :])
    try:
        checkpoint = open_checkpoint(tmp_path / "a")
    except DataError as error:
        assert str(tmp_path / "a") in str(error) or "GGUF" in str(error)
        return
    assert read_whole(checkpoint, "model.norm.weight").shape == (256,)
    checkpoint.close()


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (struct.pack("<IQQ", 3, 2**63, 0), "9,223,372,036,854,775,808 tensors"),
        (struct.pack("<IQQ", 3, 0, 2**40), "entries of metadata"),
        (struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**50), "texts"),
        (struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<I", 8) + text(b"", 2**50), "the file has"),
        (struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "arrays of type 9"),
        (struct.pack("<I", 1) + bytes(16), "GGUF version 1 is not known"),
        (struct.pack(">I", 3) + bytes(16), "for big-endian machines"),
        (
            struct.pack("<IQQ", 3, 0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
            "alignment 0 is not a power of two",
        ),
        (struct.pack("<IQQ", 3, 0, 2) + 2 * (text(b"k") + struct.pack("<II", 4, 0)), "'k' occurs twice"),
        (
            struct.pack("<IQQ", 3, 2, 0) + 2 * (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)),
            "tensors occur twice: 't'",
        ),
    ],
)
def test_what_a_file_claims_is_not_allocated(tmp_path, head, words) -> None:
    (tmp_path / "a").write_bytes(b"GGUF" + head + bytes(100_000))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words):
            open_checkpoint(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
