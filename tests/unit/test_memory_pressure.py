# SPDX-License-Identifier: Apache-2.0
"""A run that others take memory from says so with numbers, waits, and goes on, whatever the kernel's files say."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memascend_jax.config import load_config
from memascend_jax.errors import BudgetError
from memascend_jax.memory import pressure
from memascend_jax.memory.meter import MemoryRoom, memory_room
from memascend_jax.memory.pressure import MemoryWatch, stalled_percent
from memascend_jax.observe.oom import oom_count, oom_kills_since
from memascend_jax.recipes import finetune, planning
from memascend_jax.units import GIB, MIB


class Machine:
    """A root of kernel files: a machine of 8 GiB, in a cgroup of version 2 when asked to be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        own = root / "proc" / "self"
        own.mkdir(parents=True)
        (root / "proc" / "pressure").mkdir()
        (own / "cgroup").write_text("0::/job\n")
        (own / "mountinfo").write_text("31 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self.available(4 * GIB)
        self.stalled(root / "proc" / "pressure" / "memory", 0.0)

    def available(self, nbytes: int) -> None:
        draft = self.root / "proc" / "meminfo.new"
        draft.write_text(f"MemTotal: {8 * MIB} kB\nMemAvailable: {nbytes // 1024} kB\n")
        draft.replace(self.root / "proc" / "meminfo")

    def cgroup(self, *, usage: int, limit: int | str = "max", high: int | str = "max") -> Path:
        group = self.root / "sys/fs/cgroup/job"
        group.mkdir(parents=True, exist_ok=True)
        for name, value in {"current": usage, "max": limit, "high": high}.items():
            (group / f"memory.{name}").write_text(f"{value}\n")
        (group / "memory.stat").write_text("inactive_file 0\n")
        return group

    def stalled(self, path: Path, percent: float) -> None:
        path.write_text(f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 total=0\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Watched:
    """A watch over ``machine`` for a run that has 1 GiB of 3 GiB planned, and what it says."""

    def __init__(self, machine: Machine, longest_wait_s: float = 10.0) -> None:
        self.said: list[str] = []
        self.resident = 1 * GIB
        self.watch = MemoryWatch(
            3 * GIB,
            self.said.append,
            root=machine.root,
            resident_bytes=lambda: self.resident,
            look_every_s=0.01,
            longest_wait_s=longest_wait_s,
        )

    def is_short(self) -> bool:
        time.sleep(0.011)
        return self.watch.is_short()


def test_a_run_that_has_its_memory_is_not_held_up(machine: Machine) -> None:
    watched = Watched(machine)
    assert not watched.is_short()
    # What it has already needs not be available any more.
    watched.resident = 3 * GIB
    machine.available(0)
    assert not watched.is_short()
    watched.resident = 4 * GIB
    assert not watched.is_short()
    assert watched.said == []


def test_a_run_waits_with_numbers_until_memory_is_back(machine: Machine) -> None:
    watched = Watched(machine)
    machine.available(1 * GIB)
    machine.stalled(machine.root / "proc/pressure/memory", 23.4)
    assert watched.is_short()
    timer = threading.Timer(0.15, machine.available, [2 * GIB])
    timer.start()
    began = time.monotonic()
    watched.watch.wait()
    assert 0.1 < time.monotonic() - began < 5
    timer.join()
    assert watched.said[0] == (
        "warning: memory is short: 1.00 GiB available on this machine (8.00 GiB in all), but this run may still take "
        "2.00 GiB (it has 1.00 GiB of the 3.00 GiB planned). Waiting for it, up to 10 s: tasks waited for memory "
        "23 % of the last 10 s"
    )
    assert watched.said[1].startswith("there is memory again after 0.")
    assert not watched.is_short()


def test_a_run_goes_on_when_memory_does_not_come_back_and_is_held_up_once(machine: Machine) -> None:
    watched = Watched(machine, longest_wait_s=0.05)
    machine.available(1 * GIB)
    assert watched.is_short()
    watched.watch.wait()
    assert "still short after" in watched.said[-1]
    assert "go on with a smaller offload.host_memory" in watched.said[-1]
    assert not watched.is_short()
    # When it has been there again, the next shortage is another one.
    machine.available(3 * GIB)
    assert not watched.is_short()
    machine.available(1 * GIB)
    assert watched.is_short()


def test_near_the_plan_freed_memory_is_given_back_but_not_over_and_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(machine)
    trimmed: list[int] = []

    def trim() -> None:
        trimmed.append(watched.resident)
        watched.resident -= 4 * MIB

    monkeypatch.setattr(pressure, "trim_heap", trim)
    watched.watch.keep_to_plan()
    assert trimmed == []
    watched.resident = 3 * GIB - 10 * MIB
    watched.watch.keep_to_plan()
    watched.watch.keep_to_plan()
    assert len(trimmed) == 1
    watched.resident += 40 * MIB
    watched.watch.keep_to_plan()
    assert len(trimmed) == 2


def test_every_stage_is_held_to_the_plan_and_waits_when_memory_is_short() -> None:
    called: list[str] = []
    watch = SimpleNamespace(
        keep_to_plan=lambda: called.append("keep"),
        is_short=lambda: True,
        wait=lambda stopped: called.append("wait"),
    )
    session = SimpleNamespace(model=SimpleNamespace(), clock=SimpleNamespace(span=lambda name: nullcontext()))
    job = SimpleNamespace(looking=None)
    stop = SimpleNamespace(requested=False, check=lambda looking: called.append(f"check {looking}"))
    finetune._hold_up_stages(cast(Any, job), cast(Any, session), cast(Any, watch), cast(Any, stop))
    session.model.before_stage()
    assert called == ["keep", "wait"]
    job.looking = "the evaluation"
    session.model.before_stage()
    assert called[2:] == ["check the evaluation", "keep", "wait"]


def test_a_stop_ends_the_wait(machine: Machine) -> None:
    watched = Watched(machine, longest_wait_s=60)
    machine.available(1 * GIB)
    began = time.monotonic()
    watched.watch.wait(lambda: True)
    assert time.monotonic() - began < 5
    assert len(watched.said) == 1


def test_a_cgroup_that_others_fill_counts_as_the_machine_does(machine: Machine) -> None:
    watched = Watched(machine)
    machine.cgroup(usage=2 * GIB, limit=4 * GIB)
    assert not watched.is_short()
    machine.cgroup(usage=3 * GIB, limit=4 * GIB)
    assert watched.is_short()
    shortage = watched.watch.shortage()
    assert shortage is not None
    assert "1.00 GiB available in its memory cgroup (limited to 4.00 GiB)" in str(shortage)


def test_the_limit_above_which_a_cgroup_is_slowed_down_is_one(machine: Machine) -> None:
    machine.cgroup(usage=1 * GIB, limit=4 * GIB, high=2 * GIB)
    room = memory_room(machine.root)
    assert room == MemoryRoom(1 * GIB, "in its memory cgroup (limited to 2.00 GiB)")


def test_stalls_are_told_once_in_a_while_and_taken_from_the_cgroup(machine: Machine) -> None:
    watched = Watched(machine)
    group = machine.cgroup(usage=1 * GIB, limit=8 * GIB)
    machine.stalled(group / "memory.pressure", 41.6)
    assert stalled_percent(machine.root) == 41.6
    assert not watched.is_short()
    assert not watched.is_short()
    assert watched.said == [
        "warning: memory is under pressure: tasks waited for memory 42 % of the last 10 s; 4.00 GiB are available on "
        "this machine (8.00 GiB in all)"
    ]


def test_a_kernel_without_these_files_is_no_shortage(machine: Machine) -> None:
    (machine.root / "proc/pressure/memory").unlink()
    assert stalled_percent(machine.root) is None
    watched = Watched(machine)
    assert not watched.is_short()
    machine.available(1 * GIB)
    watched.watch.wait(lambda: True)
    assert watched.said[0].endswith("Waiting for it, up to 10 s")


@pytest.mark.parametrize(
    "where", ["on this machine (8.00 GiB in all)", "in its memory cgroup (limited to 2.00 GiB)"]
)
def test_a_budget_above_what_there_is_is_refused_naming_whose_limit_it_is(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if "cgroup" in where:
        machine.cgroup(usage=1 * GIB, limit=2 * GIB)
    monkeypatch.setattr(planning, "memory_room", lambda: memory_room(machine.root))
    config = load_config(["tiny_random"], [f"run.dir={tmp_path / 'run'}", "offload.host_memory=6GiB"])
    with pytest.raises(BudgetError) as caught:
        planning.plan_from_config(config)
    said = str(caught.value)
    assert said.startswith("offload.host_memory is 6.00 GiB, but only ")
    assert f" available {where}; lower it, or free memory" in said
    # The same without a budget takes what is there; a smaller one is fine.
    assert planning.plan_from_config(load_config(["tiny_random"], [f"run.dir={tmp_path / 'run'}"]))


def test_kills_for_lack_of_memory_are_counted_within_one_boot(tmp_path: Path) -> None:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("first\n")
    counter = tmp_path / "proc/vmstat"
    counter.write_text("pgfault 5\noom_kill 3\n")
    earlier = oom_count(tmp_path)
    assert earlier == {"boot_id": "first", "oom_kills": 3}
    assert oom_kills_since(earlier, tmp_path) == 0
    counter.write_text("oom_kill 5\n")
    assert oom_kills_since(earlier, tmp_path) == 2
    assert oom_kills_since({}, tmp_path) == 0
    boot.write_text("second\n")
    assert oom_kills_since(earlier, tmp_path) == 0
    counter.write_text("pgfault 5\n")
    assert oom_count(tmp_path)["oom_kills"] is None
    assert oom_kills_since(oom_count(tmp_path), tmp_path) == 0
