# SPDX-License-Identifier: Apache-2.0
"""The timeline is a file that Perfetto opens, also after a kill; it costs nothing when off and is bounded when on."""

from __future__ import annotations

import gzip
import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memascend_jax.errors import DataError
from memascend_jax.observe import trace, trace_writer
from memascend_jax.observe.overlap import common, merged, phase_overlaps
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.observe.trace_file import find_trace, read_events
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

SECOND = 1_000_000_000


def events_of(path: Path, category: str) -> list[Any]:
    return [event for event in read_events(path) if event.get("cat") == category]


# ---------------------------------------------------------------- recording


def test_off_it_allocates_nothing() -> None:
    def use() -> None:
        for _ in range(1000):
            with trace.span(trace.WAIT, "for", "something"):
                pass
            trace.phase("forward")

    use()
    before = sys.getallocatedblocks()
    use()
    assert sys.getallocatedblocks() - before < 10


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file_is_whole_json_with_every_event_on_a_named_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with trace.recording(path) as recorder:
        with trace.span(trace.UPDATE, "update", ("tile", 3)):
            time.sleep(0.002)
        recorder.add(trace.READ, "read 0", "layer.1", 5 * SECOND, 6 * SECOND, {"bytes": 7}, overlapping=True)
        recorder.count("memory", {"rss": 42})
    assert trace.current is None
    text = (gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()).decode()
    events = json.loads(text)
    assert events == list(read_events(path))
    update, read = (event for event in events if event["ph"] == "X")
    assert update["name"] == "update ('tile', 3)"
    assert update["dur"] >= 2000
    assert (read["name"], read["dur"], read["args"]) == ("layer.1", 1e6, {"bytes": 7})
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows[update["tid"]] == threading.current_thread().name
    assert rows[read["tid"]] == "read 0"
    assert next(event for event in events if event["ph"] == "C")["args"] == {"rss": 42}
    assert find_trace(tmp_path) == path


def test_transfers_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace.recording(path) as recorder:
        for begin, end in ((0, 10), (5, 15), (10, 12), (11, 20)):
            recorder.add(trace.READ, "read 0", "x", begin * SECOND, end * SECOND, overlapping=True)
    by_row: dict[int, list[tuple[float, float]]] = {}
    for event in events_of(path, trace.READ):
        by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(map(len, by_row.values())) == [1, 1, 2]
    for intervals in by_row.values():
        assert len(merged(intervals)) >= len(intervals) - 1
        assert sum(end - begin for begin, end in merged(intervals)) == sum(
            end - begin for begin, end in intervals
        )


def test_what_a_killed_run_leaves_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    for name in ("trace.json", "trace.json.gz"):
        path = tmp_path / name
        with trace.recording(path) as recorder:
            for step in range(2000):
                recorder.add(trace.READ, "read 0", f"step {step}", step, step + 1)
        whole = list(read_events(path))
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        part = list(read_events(path))
        assert 100 < len(part) < len(whole)
        assert part == whole[: len(part)]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[\n{"name":"a"},\n{"na\n{"name":"b"}\n]\n')
    with pytest.raises(DataError, match="line 3 is not an event"):
        list(read_events(path))


def test_events_beyond_what_waits_at_most_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 10)
    monkeypatch.setattr(trace_writer, "_INTERVAL_S", 60.0)
    with trace.recording(tmp_path / "trace.json") as recorder:
        for step in range(25):
            recorder.add(trace.READ, "read 0", str(step), step, step + 1)
    assert len(events_of(tmp_path / "trace.json", trace.READ)) == 10
    assert list(read_events(tmp_path / "trace.json"))[-1]["args"] == {"count": 15}
    assert "lacks 15 events" in caplog.text


def test_a_full_disk_or_the_limit_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited = trace_writer.TraceWriter(tmp_path / "limited.json", max_bytes=20_000)
    recorder = trace.Recorder(limited)
    for step in range(5000):
        recorder.add(trace.READ, "read 0", str(step), step, step + 1)
    recorder.close()
    assert "reached its limit of 20,000 bytes" in caplog.text
    kept = json.loads((tmp_path / "limited.json").read_text())
    assert 0 < len(kept) < 5000
    caplog.clear()
    writer = trace_writer.TraceWriter(tmp_path / "full.json")
    assert writer._file is not None
    writer._file.close()
    writer._file = Path("/dev/full").open("wb")  # noqa: SIM115
    writer.put(trace_writer.Event("read", "read 0", "x", 0, 1, None, False))
    writer.close()
    assert "No space left" in caplog.text


def test_one_recording_at_a_time_and_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    with trace.recording(tmp_path / "a.json"), pytest.raises(RuntimeError, match="one trace at a time"):
        trace.recording(tmp_path / "b.json").__enter__()
    with pytest.raises(OSError, match="missing"):
        trace.recording(tmp_path / "missing" / "a.json").__enter__()
    assert trace.current is None


# ---------------------------------------------------------------- where it is recorded


def test_the_step_clock_puts_copies_and_waits_on_the_timeline(tmp_path: Path) -> None:
    clock = StepClock()
    path = tmp_path / "trace.json"
    with trace.recording(path):
        with clock.span("device_to_host"):
            time.sleep(0.003)
        with clock.span("ssd_read_wait"):
            time.sleep(0.003)
        with clock.span("ssd_read_wait"):
            pass
    (copy,) = events_of(path, trace.COPY)
    (wait,) = events_of(path, trace.WAIT)
    assert (copy["name"], wait["name"]) == ("device_to_host", "ssd_read_wait")
    assert copy["ts"] + copy["dur"] <= wait["ts"]


def test_every_transfer_of_a_store_is_recorded_from_submission_to_completion(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    members = [tmp_path / "a.store", tmp_path / "b.store"]
    spec = TensorSpec("weight", "float32", (1 << 20,), 1 << 18)
    with (
        trace.recording(path),
        TensorStore.create(members, specs=[spec], scratch_bytes=1 << 20, direct_io="optional") as store,
    ):
        began = time.perf_counter_ns()
        store.put("weight", np.arange(1 << 20, dtype=np.float32))
        store.commit(b"")
        before = store.counters()
        np.testing.assert_array_equal(store.get("weight"), np.arange(1 << 20, dtype=np.float32))
        read = store.counters().read_bytes - before.read_bytes
        assert time.perf_counter_ns() - began < 60 * SECOND
    reads = [event for event in events_of(path, trace.READ) if event["name"] == "weight"]
    writes = [event for event in events_of(path, trace.WRITE) if event["name"].startswith("weight[")]
    assert sum(event["args"]["bytes"] for event in reads) == read == 4 << 20
    assert sum(event["args"]["bytes"] for event in writes) == 4 << 20
    rows = {
        event["tid"]: event["args"]["name"] for event in read_events(path) if event["name"] == "thread_name"
    }
    assert {rows[event["tid"]] for event in reads} == {
        f"read {i}: {member}" for i, member in enumerate(members)
    }
    for event in (*reads, *writes):
        assert event["dur"] > 0
        assert 0 <= event["args"]["queued_us"] <= event["dur"]
    assert any(event["name"] == "metadata" for event in events_of(path, trace.WRITE))
    assert any("for the flush of" in event["name"] for event in events_of(path, trace.WAIT))


class FakeArray:
    """An array that is ready ``after_s`` seconds after it was asked for."""

    def __init__(self, after_s: float, nbytes: int = 4, *, deleted: bool = False) -> None:
        self.nbytes = nbytes
        self._after_s = after_s
        self._deleted = deleted

    def is_deleted(self) -> bool:
        return self._deleted

    def block_until_ready(self) -> None:
        if self._deleted:
            raise RuntimeError("Array has been deleted")
        time.sleep(self._after_s)


def test_computations_run_one_after_the_other_and_phases_end_with_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace.recording(path) as recorder:
        watch = recorder.watch_computing()
        trace.phase("forward")
        watch.dispatched("one", time.perf_counter_ns(), [FakeArray(0.03)])
        watch.dispatched("two", time.perf_counter_ns(), [FakeArray(0.02, 8), FakeArray(9, 4, deleted=True)])
        trace.phase("backward")
        watch.dispatched("donated", time.perf_counter_ns(), [FakeArray(9, deleted=True)])
        watch.dispatched("three", time.perf_counter_ns(), [FakeArray(0.02)])
    one, two, three = events_of(path, trace.COMPUTE)
    assert [event["name"] for event in (one, two, three)] == ["one", "two", "donated, three"]
    assert one["dur"] >= 30_000
    assert two["ts"] == pytest.approx(one["ts"] + one["dur"], abs=2)
    forward, backward = events_of(path, trace.PHASE)
    assert forward["ts"] + forward["dur"] >= two["ts"] + two["dur"]
    assert backward["ts"] == pytest.approx(forward["ts"] + forward["dur"], abs=2)
    assert backward["ts"] + backward["dur"] >= three["ts"] + three["dur"]


def test_copies_to_the_device_have_a_row_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace.recording(path) as recorder:
        recorder.watch_computing().dispatched("layer", time.perf_counter_ns(), [FakeArray(0.05)])
        recorder.copied("weight", time.perf_counter_ns(), FakeArray(0.01))
    (copy,), (computed,) = events_of(path, trace.COPY), events_of(path, trace.COMPUTE)
    assert copy["name"] == "weight"
    assert copy["tid"] != computed["tid"]
    # It did not wait for the computation.
    assert copy["ts"] + copy["dur"] < computed["ts"] + computed["dur"]


def test_results_of_a_device_far_behind_are_not_held(tmp_path: Path) -> None:
    with trace.recording(tmp_path / "trace.json") as recorder:
        watch = recorder.watch_computing()
        arrays = [FakeArray(0.2), *(FakeArray(0.0) for _ in range(400))]
        before = [sys.getrefcount(array) for array in arrays]
        for array in arrays:
            watch.dispatched("x", time.perf_counter_ns(), [array])
        after = [sys.getrefcount(array) for array in arrays]
        held = sum(more > count for count, more in zip(before, after, strict=True))
        assert 0 < held <= 258


# ---------------------------------------------------------------- overlap


def event(category: str, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}


def test_overlap_is_the_share_of_the_shorter_that_runs_under_the_other() -> None:
    warm_up = [event("phase", "forward", 0, 10), event("phase", "backward", 10, 20)]
    step = [
        event("phase", "forward", 20, 30),
        event("compute", "layer", 20, 24),
        event("update", "tile", 23, 26),  # computing: 20 to 26
        event("read", "a", 24, 30),
        event("write", "b", 25, 28),  # I/O: 24 to 30, of which 2 under computing
        event("phase", "backward", 30, 40),
        event("compute", "layer", 30, 40),
        event("read", "c", 33, 35),
        event("wait", "for c", 30, 40),
        event("phase", "commit", 38, 44),
        event("phase", "commit", 90, 95),  # after training: nothing to hide behind
    ]
    commit, forward, backward = sorted(phase_overlaps([*step, *warm_up]), key=lambda o: o.phase != "commit")
    assert (forward.phase, forward.count, forward.seconds) == ("forward", 1, 10)
    assert (forward.compute_s, forward.io_s, forward.both_s) == (6, 6, 2)
    assert forward.share == pytest.approx(1 / 3)
    assert (backward.compute_s, backward.io_s, backward.share) == (10, 2, 1.0)
    assert (commit.seconds, commit.share) == (2, 1.0)
    assert forward.to_json()["overlap"] == 0.3333


def test_a_phase_without_input_or_output_has_no_overlap() -> None:
    (only,) = phase_overlaps([event("phase", "forward", 0, 10), event("compute", "layer", 1, 9)])
    assert only.share is None
    assert only.to_json()["overlap"] is None
    assert phase_overlaps([]) == []
    assert phase_overlaps([event("phase", "commit", 0, 1)]) == []


def test_unions_and_intersections_of_intervals_agree_with_counting() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sets = []
        for _ in range(2):
            begins = random.integers(0, 90, 12)
            sets.append(
                [(int(b), int(b + n)) for b, n in zip(begins, random.integers(0, 12, 12), strict=True)]
            )
        cells = [{c for b, e in intervals for c in range(b, e)} for intervals in sets]
        one, other = map(merged, sets)
        assert sum(e - b for b, e in one) == len(cells[0])
        assert sum(e - b for b, e in common(one, other)) == len(cells[0] & cells[1])


def test_the_writer_says_nothing_when_nothing_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), trace.recording(tmp_path / "trace.json"):
        pass
    assert caplog.text == ""
