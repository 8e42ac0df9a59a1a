# SPDX-License-Identifier: Apache-2.0
"""The meter sees what is really touched and locked, and the cgroup reader finds the tightest limit."""

from __future__ import annotations

import mmap
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from memascend_jax.memory import meter as meter_module
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.cgroup import CgroupMemory, memory_cgroups, read_number, usage_file
from memascend_jax.memory.meter import (
    Meter,
    available_memory_bytes,
    peak_rss_bytes,
    process_io_bytes,
    take_sample,
)
from memascend_jax.observe.meter_log import MeterLog, read_meter

MIB = 1 << 20
#: The kernel updates resident counters in batches per thread.
SLACK = 4 * MIB


def test_touched_memory_is_seen_and_the_peak_stays_when_it_is_gone() -> None:
    before = take_sample()
    block = mmap.mmap(-1, 64 * MIB)
    np.frombuffer(block, np.uint8)[::4096] = 1
    touched = take_sample()
    assert touched.anonymous_bytes + touched.shared_bytes >= (
        before.anonymous_bytes + before.shared_bytes + 64 * MIB - SLACK
    )
    block = None  # type: ignore[assignment]
    after = take_sample()
    assert after.rss_bytes <= touched.rss_bytes - 64 * MIB + 2 * SLACK
    assert peak_rss_bytes() >= touched.rss_bytes - SLACK


def test_locked_memory_is_the_arenas() -> None:
    before = take_sample().locked_bytes
    arena = PinnedArena(8 * MIB)
    if arena.pinning != "mlock":
        pytest.skip(arena.pinning_reason)
    assert take_sample().locked_bytes - before == 8 * MIB
    arena.close()
    assert take_sample().locked_bytes == before


def test_the_log_has_what_the_process_and_the_gauges_say_over_time(tmp_path: Path) -> None:
    path = tmp_path / "meter.jsonl"
    meter = Meter(MeterLog(path, {"budget_bytes": 7}), interval_s=0.01)
    with meter:
        time.sleep(0.06)
        block = np.ones(48 * MIB, np.uint8)
        meter.use_gauges(lambda: {"leased:layer": 3, "device": None})
        time.sleep(0.1)
        meter.use_gauges(dict)
        assert meter.snapshot().rss_bytes > block.nbytes
    first = read_meter(path)[0]
    (second,) = (series for series in read_meter(path) if "device" in series.columns)
    assert first.facts == {"budget_bytes": 7}
    assert all(a <= b for a, b in pairwise([*first.seconds, *second.seconds]))
    assert second.columns["leased:layer"] == [3] * len(second.seconds)
    assert second.columns["device"] == [None] * len(second.seconds)
    before, after = first.columns["anonymous"][0], second.columns["anonymous"][-1]
    assert before is not None
    assert after is not None
    assert after - before >= 48 * MIB - SLACK
    peaks = [*first.columns["peak"], *second.columns["peak"]]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(peaks))


def test_the_log_ends_with_the_last_values_of_the_gauges(tmp_path: Path) -> None:
    path = tmp_path / "meter.jsonl"
    counted = 0
    with Meter(MeterLog(path, {}), interval_s=60) as meter:
        meter.use_gauges(lambda: {"ssd_written": counted})
        counted = 5
        meter.use_gauges(dict)
        counted = 6
    assert [series.columns["ssd_written"] for series in read_meter(path)] == [[5]]


def test_a_line_that_a_kill_cut_off_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "meter.jsonl"
    for session in range(3):
        log = MeterLog(path, {"session": session})
        log.write(time.monotonic(), {"rss": 5, "peak": 6})
        log.write(time.monotonic(), {"rss": 7, "peak": 8})
        log.close()
        path.write_bytes(path.read_bytes()[:-4])
    series = read_meter(path)
    assert [one.facts["session"] for one in series] == [0, 1, 2]
    assert [one.columns for one in series] == [{"rss": [5], "peak": [6]}] * 3


def test_a_log_that_cannot_be_written_ends_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "meter.jsonl").symlink_to("/dev/full")
    log = MeterLog(tmp_path / "meter.jsonl", {})
    log.write(time.monotonic(), {"rss": 5})
    log.write(time.monotonic(), {"rss": 5})
    log.close()
    assert "No space left on device" in caplog.text
    assert caplog.text.count("ends here") == 1


def test_the_interval_grows_so_that_a_long_run_has_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "_SAMPLES_PER_INTERVAL", 5)
    with Meter(MeterLog(tmp_path / "meter.jsonl", {}), interval_s=0.002):
        time.sleep(0.5)
    (series,) = read_meter(tmp_path / "meter.jsonl")
    # 5 samples each at 2, 4, 8, 16, 32, … ms.
    assert 10 < len(series.seconds) < 40
    assert series.seconds[-1] - series.seconds[-2] > 10 * 0.002


def test_a_sample_costs_less_than_a_thousandth_of_the_default_interval() -> None:
    take_sample()
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            take_sample()
        rounds.append((time.perf_counter() - began) / 20)
    assert min(rounds) < 0.25 / 1000


def test_machine_figures_are_plausible() -> None:
    assert 0 < available_memory_bytes() < 1 << 50
    assert process_io_bytes().read_bytes >= 0


def _proc(root: Path, cgroup: str, mountinfo: str) -> None:
    own = root / "proc" / "self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(cgroup)
    (own / "mountinfo").write_text(mountinfo)


def _files(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_version_2_limits_of_all_ancestors_are_read(tmp_path: Path) -> None:
    _proc(tmp_path, "0::/a/b\n", "31 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    top = tmp_path / "sys/fs/cgroup"
    _files(top / "a", memory__current=500, memory__max=1000, memory__stat="anon 1\ninactive_file 200")
    _files(top / "a/b", memory__current=300, memory__max="max", memory__stat="inactive_file 0")
    inner, outer = memory_cgroups(tmp_path)
    assert inner == CgroupMemory(None, 300, 0)
    assert inner.available_bytes is None
    assert outer == CgroupMemory(1000, 500, 200)
    assert outer.available_bytes == 700
    usage = usage_file(tmp_path)
    assert usage is not None
    assert read_number(usage) == 300


def test_version_1_in_a_container_is_read_at_the_mount_point(tmp_path: Path) -> None:
    _proc(
        tmp_path,
        "9:memory:/docker/abc\n1:name=systemd:/x\n",
        "40 23 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 23 0:31 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
    )
    _files(
        tmp_path / "sys/fs/cgroup/memory",
        memory__usage_in_bytes=64,
        memory__limit_in_bytes=4096,
        memory__stat="total_inactive_file 16",
    )
    assert memory_cgroups(tmp_path) == [CgroupMemory(4096, 64, 16)]


def test_unlimited_version_1_is_no_limit(tmp_path: Path) -> None:
    _proc(tmp_path, "9:memory:/\n", "40 23 0:30 / /cg ro - cgroup cgroup rw,memory\n")
    _files(tmp_path / "cg", memory__usage_in_bytes=64, memory__limit_in_bytes=9223372036854771712)
    assert memory_cgroups(tmp_path) == [CgroupMemory(None, 64, 0)]


def test_no_cgroups_at_all_is_no_limit(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path) == []
    assert usage_file(tmp_path) is None
