# SPDX-License-Identifier: Apache-2.0
"""Files read in streams past the page cache: every byte, ahead, and each array is the caller's."""

from __future__ import annotations

import os

import numpy as np
import pytest

from memascend_jax.checkpoints import positioned_file
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.errors import DataError
from memascend_jax.storage.engine import ReusedBuffers

SIZE = 100_003


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(params=["direct", "page cache"])
def file(request, tmp_path, content, monkeypatch):
    if request.param == "page cache":
        monkeypatch.setattr(PositionedFile, "_direct_engine", lambda self: None)
    (tmp_path / "a").write_bytes(content.tobytes())
    opened = PositionedFile(tmp_path / "a")
    yield opened
    opened.close()


@pytest.mark.parametrize("step", [1000, 4096, 8192, 30_000, SIZE])
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, SIZE), (8, 50_000), (4096, 8192), (4097, 4099), (98_304, SIZE), (99_999, SIZE), (7, 7)],
)
def test_a_stream_is_the_bytes_of_the_file(file, content, start, end, step) -> None:
    parts = list(file.stream(start, end - start, step, "a test"))
    assert all(len(part) == step for part in parts[:-1])
    # All of them are held at once: none may have been used again for a later one.
    joined = np.concatenate([np.empty(0, np.uint8), *parts])
    np.testing.assert_array_equal(joined, content[start:end])


def test_a_stream_that_is_given_up_ends_its_reads(file) -> None:
    stream = file.stream(0, SIZE, 4096, "a test")
    assert len(next(stream)) == 4096
    stream.close()


def test_what_lies_beyond_the_file_is_refused(file) -> None:
    with pytest.raises(DataError, match="truncated or damaged"):
        next(file.stream(0, SIZE + 1, 4096, "a test"))


def test_a_file_that_becomes_shorter_is_named(file) -> None:
    os.truncate(file.path, 50_000)
    with pytest.raises(DataError, match="became shorter while it was read"):
        list(file.stream(0, SIZE, 8192, "a test"))


def test_where_direct_reads_are_not_possible_the_page_cache_serves(tmp_path, content, monkeypatch) -> None:
    (tmp_path / "a").write_bytes(content.tobytes())
    opened = os.open

    def refuse_direct(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(positioned_file.os, "open", refuse_direct)
    file = PositionedFile(tmp_path / "a")
    np.testing.assert_array_equal(np.concatenate(list(file.stream(0, SIZE, 9000, "a test"))), content)
    file.close()


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    buffers = ReusedBuffers()
    first = buffers.take(8192)
    first[:] = 1
    view = first[100:200].view(np.uint16)[:3]
    address = first.ctypes.data
    del first
    assert buffers.take(8192).ctypes.data != address
    assert (view == 257).all()
    del view
    assert buffers.take(4096).ctypes.data == address
