# SPDX-License-Identifier: Apache-2.0
"""Tiles that are on their way together are all there at the commit, and a failure is not lost."""

from __future__ import annotations

import numpy as np
import pytest
from stores import ANY_DISK

from memascend_jax.errors import StoreError
from memascend_jax.storage import tile_stream
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.storage.tile_stream import TileStream

SPECS = [
    TensorSpec("a", "float32", (100, 70), tile_elements=2048),
    TensorSpec("b", "bfloat16", (3,)),
    TensorSpec("empty", "float32", (0, 4)),
    TensorSpec("rows", "uint16", (500, 9), tile_elements=2048, row_access=True, mutable=False),
]


@pytest.fixture
def store(tmp_path):
    with TensorStore.create(tmp_path / "a.store", specs=SPECS, **ANY_DISK) as made:
        yield made


@pytest.mark.parametrize("in_flight", [1, 10_000, 1 << 20])
def test_what_is_streamed_is_what_is_stored(store, tmp_path, monkeypatch, in_flight) -> None:
    monkeypatch.setattr(tile_stream, "_IN_FLIGHT_BYTES", in_flight)
    rng = np.random.default_rng(0)
    values = {spec.name: rng.integers(0, 99, spec.shape).astype(spec.dtype) for spec in SPECS}
    with TileStream(store) as stream:
        stream.write("a", 0, values["a"].reshape(-1)[:4096])
        stream.write("b", 0, values["b"])
        stream.write("rows", 0, values["rows"])
        stream.write("a", 4096, values["a"].reshape(-1)[4096:])
        stream.write("empty", 0, values["empty"])
    store.commit()
    for name, expected in values.items():
        np.testing.assert_array_equal(store.get(name), expected)
    assert not store.verify().faults


@pytest.mark.parametrize(("start", "count"), [(0, 100), (100, 2048), (6144, 2048), (8192, 10)])
def test_pieces_of_tiles_are_refused(store, start, count) -> None:
    with pytest.raises(StoreError, match="not whole tiles"):
        TileStream(store).write("a", start, np.zeros(count, np.float32))
