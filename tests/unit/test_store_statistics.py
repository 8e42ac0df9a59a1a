# SPDX-License-Identifier: Apache-2.0
"""What the store counts: per member in a session, over its life, and how long the drives last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stores import ANY_DISK

from memascend_jax.errors import StoreError
from memascend_jax.storage.endurance import expected_life
from memascend_jax.storage.statistics import Traffic, latency_quantile, member_statistics
from memascend_jax.storage.tensor_store import TensorStore

DAY = 86_400.0


def test_members_carry_their_share_of_the_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with TensorStore.create(paths, capacity="48MiB", weights=(2, 1), **ANY_DISK) as store:
        before = store.statistics()
        store.put("w", np.zeros(12 << 20, np.uint8))
        after = store.statistics()
        assert [member.path for member in after] == store.paths
        written = [new.write_bytes - old.write_bytes for old, new in zip(before, after, strict=True)]
        assert written == [8 << 20, 4 << 20]
        store.get("w")
        read = [new.read_bytes - old.read_bytes for old, new in zip(after, store.statistics(), strict=True)]
        assert read == [8 << 20, 4 << 20]
        totals = store.counters()
        assert sum(member.write_bytes for member in store.statistics()) == totals.write_bytes


def test_bytes_written_over_the_life_of_the_store_are_kept(tmp_path: Path) -> None:
    for session in range(1, 4):
        opened = TensorStore.create if session == 1 else TensorStore.open
        arguments = {"capacity": "16MiB"} if session == 1 else {}
        with opened(tmp_path, **arguments, **ANY_DISK) as store:  # type: ignore[operator]
            store.put("w", np.zeros(4 << 20, np.uint8))
            store.commit()
            written = store.inspect()["bytes_written"]
        assert session * (4 << 20) <= written < session * (4 << 20) + (1 << 20)


def test_engine_that_measures_is_believed() -> None:
    measured = [{"read_bytes": 5, "read_latency": [0, 3, 1], "queue_depth": 7.5, "unknown": 1}]
    (member,) = member_statistics(["/dev/x"], Traffic(1), measured)
    assert (member.read_bytes, member.read_latency, member.queue_depth) == (5, (0, 3, 1), 7.5)
    facts = member.to_json()
    assert facts["read_latency_p50_s"] == 2e-6
    assert facts["read_latency_p99_s"] == 4e-6
    assert "write_latency_p50_s" not in facts


def test_quantile_is_the_upper_edge_of_its_bucket() -> None:
    assert latency_quantile([1], 0.5) == 1e-6
    assert latency_quantile([0, 0, 0, 10], 0.99) == 8e-6
    assert latency_quantile([98, 0, 2], 0.98) == 1e-6
    assert latency_quantile([98, 0, 2], 0.99) == 4e-6


def facts(weights: list[int], written: float) -> dict[str, object]:
    members = [{"path": f"/dev/{index}", "weight": weight} for index, weight in enumerate(weights)]
    return {"members": members, "bytes_written": written, "created_s": 0.0}


def test_expected_life_follows_from_the_pace() -> None:
    first, second = expected_life(facts([3, 1], 40e12), [600, 100], now_s=10 * DAY)
    assert (first["bytes_written"], second["bytes_written"]) == (30e12, 10e12)
    assert (first["used"], second["used"]) == (0.05, 0.1)
    assert first["bytes_per_day"] == pytest.approx(3e12)
    assert (first["days_left"], second["days_left"]) == (pytest.approx(190), pytest.approx(90))
    (worn,) = expected_life(facts([1], 700e12), [600], now_s=DAY)
    assert worn["days_left"] == 0
    (young,) = expected_life(facts([1], 1e12), [600], now_s=60)
    assert young["days_left"] is None


@pytest.mark.parametrize("ratings", [[], [1, 2, 3], [0], [-1], [float("inf")]])
def test_ratings_that_make_no_sense_are_refused(ratings: list[float]) -> None:
    with pytest.raises(StoreError, match="rated TBW must be one positive number"):
        expected_life(facts([1, 1], 1), ratings)
