# SPDX-License-Identifier: Apache-2.0
"""What a run writes and shows: metrics that survive, progress that does not flood a log, tables that hold."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memascend_jax.errors import DataError, StoppedError, StoreError
from memascend_jax.observe import progress, report
from memascend_jax.observe.example import Preview, show_preview
from memascend_jax.observe.failure import exit_status
from memascend_jax.observe.metrics import MetricsFile, read_lines
from memascend_jax.observe.process import is_gone, this_process
from memascend_jax.observe.report import read_run
from memascend_jax.observe.summary import sample_table, status_line, summary_rows
from memascend_jax.training.stop import STOP_SIGNALS, StopRequest


def line(step: int, **more: Any) -> dict[str, Any]:
    figures = {"loss": 4.0 / step, "step_seconds": 2.0, "tokens": 100, "host_rss_bytes": 1 << 30}
    return {"step": step, **figures, "ssd_read_bytes": 3 << 30, "ssd_write_bytes": 2 << 30, **more}


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, legacy_windows=False, _environ={})


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---------------------------------------------------------------- metrics


def test_metrics_are_cut_back_to_the_committed_step(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        ends = [metrics.write(line(step)) for step in (1, 2, 3)]
    assert ends[-1] == path.stat().st_size
    with MetricsFile(path, ends[1]) as metrics:
        assert metrics.write(line(3, loss=0.5)) == path.stat().st_size
    assert [entry["step"] for entry in read_lines(path)] == [1, 2, 3]
    assert read_lines(path)[-1]["loss"] == 0.5


def test_metrics_line_is_on_disk_before_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd))[1])
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        assert metrics.write(line(1)) == synced[-1]


def test_short_write_of_a_metrics_line_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.write(line(1))
        metrics.write(line(2))
    assert [entry["step"] for entry in read_lines(tmp_path / "m.jsonl")] == [1, 2]


def test_full_disk_names_the_metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="cannot write the metrics file") as caught:
            metrics.write(line(1))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "m.jsonl")


def test_lost_metrics_do_not_stop_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsFile(tmp_path / "m.jsonl", 1000) as metrics:
        assert metrics.write(line(8)) == (tmp_path / "m.jsonl").stat().st_size
    assert "earlier lines are missing" in caplog.text


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.write({"loss": float("nan"), "split": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"loss": None, "split": [None, 1.0]}


# ---------------------------------------------------------------- progress


def test_log_gets_one_line_per_30_seconds_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = console()
    with progress.show_training(out, 50) as on_line:
        for step in range(1, 51):
            now += 2.0
            on_line(line(step))
    lines = text_of(out).splitlines()
    assert [entry.split()[0] for entry in lines] == [
        "step=1/50",
        "step=16/50",
        "step=31/50",
        "step=46/50",
        "step=50/50",
    ]
    assert all(re.fullmatch(r"(\w+=\S+ ?)+", entry) for entry in lines)
    assert "\x1b" not in text_of(out)


def test_time_left_ignores_the_step_that_compiles() -> None:
    out = console()
    with progress.show_training(out, 3) as on_line:
        on_line(line(1, step_seconds=100.0))
        on_line(line(2, step_seconds=2.0))
        on_line(line(3, step_seconds=2.0))
    first, last = text_of(out).splitlines()
    assert "tokens_per_s=50.0" in last
    assert "time_left=0.0s" in last
    assert "tokens_per_s" not in first
    assert "time_left" not in first


def test_terminal_gets_a_bar_with_the_figures() -> None:
    out = console(terminal=True)
    with progress.show_training(out, 2) as on_line:
        on_line(line(1))
        on_line(line(2))
    for figure in ("loss 2.0000", "tok/s", "1.00 GiB", "3.00 GiB/2.00 GiB per step", "left", "2/2"):
        assert figure in text_of(out)


def test_items_are_counted_without_a_terminal() -> None:
    out = console()
    with progress.show_items(out, "reading the model", 3) as on_item:
        for name in "abc":
            on_item(name)
    assert text_of(out).splitlines() == [
        "doing=reading_the_model done=1/3",
        "doing=reading_the_model done=3/3",
    ]


# ---------------------------------------------------------------- example, summary, report


def test_trained_tokens_are_marked_with_and_without_colour() -> None:
    preview = Preview([("question [b]", False), ("answer [x]", True)], [("kept", "1", "0")], ["a note"])
    plain, colour = console(), console(terminal=True)
    show_preview(plain, preview)
    show_preview(colour, preview)
    assert "question [b]⟦answer [x]⟧" in text_of(plain)
    assert "note: a note" in text_of(plain)
    assert "answer [x]" in text_of(colour)
    assert "⟦" not in text_of(colour)


def test_long_example_is_shortened() -> None:
    out = console()
    show_preview(out, Preview([("x" * 5000, True), ("tail", False)], []))
    assert "…" in text_of(out)
    assert "tail" not in text_of(out)


def test_summary_shows_change_and_share_of_the_plan() -> None:
    rows = dict(
        summary_rows(
            {
                "eval_loss_before": 4.0,
                "eval_loss_after": 3.0,
                "ssd_read_bytes_per_step": 2 << 30,
                "planned_ssd_read_bytes_per_step": 1 << 30,
                "step_seconds": 2.0,
                "compute": 1.0,
                "skipped_steps": 0,
            }
        )
    )
    assert rows["held-out loss"] == "4.0000 → 3.0000  (-25.0 %)"
    assert rows["read from SSD per step"] == "2.00 GiB  (2.000 of the plan)"
    assert rows["time of a step"] == "compute 50%"
    assert "skipped steps" not in rows


def test_answers_are_shown_as_they_are() -> None:
    out = console()
    out.print(sample_table([("q [red]", "a", "[/b] before", "after")]))
    assert "[/b] before" in text_of(out)
    assert "q [red]" in text_of(out)


def test_report_of_a_running_run_is_made_from_its_metrics(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for step in (1, 2, 3):
            metrics.write(line(step, step_seconds=10.0 if step == 1 else 2.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    (tmp_path / "status.json").write_text('{"state": "running", "step": 3, "total_steps": 9}')
    run = read_run(tmp_path)
    assert run["steps_recorded"] == 3
    assert run["summary"]["step_seconds_median"] == 2.0
    assert "of the plan" not in str(summary_rows(run["summary"]))
    assert str(status_line(run["status"])) == "running at step 3 of 9"


def test_report_of_a_killed_run_compares_with_its_plan_and_its_split_is_one_step(tmp_path: Path) -> None:
    plan = {"parameters": 7, "ssd_read_bytes_per_step": 1000, "ssd_write_bytes_per_step": 500}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    waited = [0.0, 0.5, 1.9, 0.5, 0.5, 1.9]
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for step, wait in enumerate(waited, start=1):
            moved = {"ssd_read_bytes": 1000 * (step > 1), "ssd_write_bytes": 500}
            seconds = 1.0 + 2 * wait
            split = {"ssd_read_wait": wait, "compute": seconds - wait}
            metrics.write(line(step, step_seconds=seconds) | moved | split)
    summary = read_run(tmp_path)["summary"]
    rows = dict(summary_rows(summary))
    assert rows["parameters"] == "7"
    assert rows["read from SSD per step"] == "1000 B  (1.000 of the plan)"
    assert rows["written to SSD per step"] == "500 B  (1.000 of the plan)"
    # 5 and 5.3 seconds of the steps but the first; the last one by itself has 60 and 40 %.
    assert rows["time of a step"] == "compute 66%, ssd read wait 34%"


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((1, 1, 1), [34, 33, 33]),
        ((0.505, 0.335, 0.15), [51, 33, 15]),
        ((0.995, 0.005), [100]),
    ],
)
def test_shares_of_a_step_are_never_more_than_the_whole(parts: tuple[float, ...], told: list[int]) -> None:
    names = ("compute", "ssd_read_wait", "optimizer")
    summary = {"step_seconds": max(sum(parts), 1.0), **dict(zip(names, parts, strict=False))}
    shares = dict(summary_rows(summary))["time of a step"]
    assert sum(map(int, re.findall(r"(\d+)%", shares))) <= 100
    assert [int(share) for share in re.findall(r"(\d+)%", shares)][: len(told)] == told


def test_process_is_gone_when_it_ended_or_its_number_is_anothers() -> None:
    mine = this_process()
    assert not is_gone(mine)
    assert is_gone({**mine, "pid_start": mine["pid_start"] - 1})
    script = (
        "import json; from memascend_jax.observe.process import this_process as p; print(json.dumps(p()))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        other = json.loads(child.stdout.read())
        assert other["pid"] == child.pid
        # Ended, though nobody has asked for its status yet.
        deadline = time.monotonic() + 10
        while not is_gone(other):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert is_gone(other)


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pid_namespace": "pid:[1]"}, {"host": None}])
def test_process_elsewhere_is_not_said_to_be_gone(elsewhere: dict[str, Any]) -> None:
    assert not is_gone({**this_process(), "pid_start": 1, **elsewhere})


@pytest.mark.parametrize(
    ("state", "gone", "said"),
    [
        ("running", True, "died at step 3 of 9: there is no process 7 any more"),
        ("running", False, "running at step 3 of 9"),
        ("starting", True, "died at step 3 of 9: there is no process 7 any more"),
        ("done", True, "done at step 3 of 9"),
        ("stopped", True, "stopped at step 3 of 9"),
    ],
)
def test_report_tells_a_run_that_died_from_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, gone: bool, said: str
) -> None:
    monkeypatch.setattr(report, "is_gone", lambda status: gone)
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 3, "total_steps": 9, "pid": 7}))
    assert str(status_line(read_run(tmp_path)["status"])) == said


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_folder_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(DataError, match="cannot re"):
        read_run(tmp_path)


# ---------------------------------------------------------------- exit status


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (StoreError("the store is gone"), 6, "memascend: the store is gone"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "No such file: '/x'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failure_is_one_message_and_its_status(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(lambda: _raise(error)) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: _raise(ZeroDivisionError()))


# ---------------------------------------------------------------- Ctrl-C


def run_program_with(
    main: str, interrupts: int | None, number: signal.Signals = signal.SIGINT, resumable: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a program whose ``main`` prints ``ready`` when it may be interrupted, and sends it ``number`` so often.

    None: without end, until it is gone.
    """
    script = f"""
import atexit, os, sys, time
from memascend_jax.observe.failure import run_program, say_at_once
{main}
run_program(main, resumable={resumable})
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(interrupts or 0):
            process.send_signal(number)
            time.sleep(0.05)
        while interrupts is None and process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        out, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


WAITS = "print('ready', flush=True); time.sleep(20)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_lets_a_program_clean_up_and_ends_it_with_130(number: signal.Signals) -> None:
    done = run_program_with(
        f"""
def main():
    try:
        {WAITS}
    finally:
        print("cleaned", flush=True)
    return 0
""",
        1,
        number,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned\n", "memascend: interrupted\n")


def test_second_interrupt_ends_a_program_whose_clean_up_takes_long() -> None:
    main = f"""
def main():
    try:
        {WAITS}
    finally:
        time.sleep(20)
"""
    assert run_program_with(main, 2).returncode == 130


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("times", [1, 2])
def test_program_that_can_be_given_again_tells_a_scheduler_so(
    number: signal.Signals, status: int, times: int
) -> None:
    main = f"""
def main():
    try:
        {WAITS}
    finally:
        time.sleep(20 if {times} == 2 else 0)
"""
    done = run_program_with(main, times, number, resumable=True)
    assert done.returncode == status
    assert ("SIGTERM" in done.stderr) == (status == 75)


@pytest.mark.parametrize("status", [0, 75])
def test_interrupts_during_the_interpreters_shutdown_change_nothing(status: int) -> None:
    main = f"""
@atexit.register
def close():
    print("ready", flush=True)
    time.sleep(0.1)
    print("closed", flush=True)

def main():
    return {status}
"""
    done = run_program_with(main, None)
    assert (done.returncode, done.stdout, done.stderr) == (status, "closed\n", "")


def test_interrupt_that_nobody_can_catch_ends_the_program() -> None:
    main = f"""
class Slow:
    def __del__(self):
        {WAITS}

def main():
    Slow()
    time.sleep(20)
"""
    assert run_program_with(main, 1).returncode == 130


def test_interrupt_that_became_another_error_is_one_still() -> None:
    main = f"""
def main():
    try:
        {WAITS}
    except KeyboardInterrupt as error:
        raise ImportError("half imported") from error
"""
    assert run_program_with(main, 1).returncode == 130


def test_program_keeps_the_traceback_of_a_defect() -> None:
    script = "from memascend_jax.observe.failure import run_program; run_program(lambda: 1 // 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_stop_request_tells_of_the_first_interrupt_and_passes_on_the_second() -> None:
    told: list[str] = []
    passed_on: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: passed_on.append(number))
    try:
        with StopRequest(told.append) as stop:
            signal.raise_signal(signal.SIGINT)
            assert (stop.requested, told, passed_on) == (True, ["SIGINT"], [])
            signal.raise_signal(signal.SIGTERM)
            assert passed_on == []
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert passed_on == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert passed_on == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_signal_that_schedulers_send_is_a_request_to_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check("now")
        signal.raise_signal(number)
        with pytest.raises(StoppedError, match=f"stopped by {signal.Signals(number).name} now"):
            stop.check("now")
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
