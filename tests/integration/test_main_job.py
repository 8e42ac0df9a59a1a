# SPDX-License-Identifier: Apache-2.0
"""The real command on the tiny recipe: its files, its figures, stopping, going on, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.report import read_run
from memascend_jax.observe.step_clock import SPANS
from memascend_jax.storage.tensor_store import TensorStore

pytestmark = pytest.mark.integration

PROGRAM = [sys.executable, "-m", "memascend_jax.recipes.llama_finetune"]
#: What a step reports of its mathematics, as opposed to its time.
EXACT = ("step", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped_steps", "tokens")


def command(run_dir, *overrides):
    return [
        *PROGRAM,
        "--config",
        "tiny_random",
        f"run.dir={run_dir}",
        "offload.direct_io=optional",
        *overrides,
    ]


def run(run_dir, *overrides, cwd=None):
    return subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, cwd=cwd, timeout=250)


def metrics(run_dir):
    return read_lines(Path(run_dir) / "metrics.jsonl")


def exact(lines):
    return [{key: line[key] for key in EXACT} for line in lines]


def tensors(run_dir):
    return load_file(Path(run_dir) / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the tiny recipe that nobody disturbed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = run(folder, "train.steps=12")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_leaves_its_files(finished):
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "summary.json", "status.json", "export"} <= names
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 12)


def test_metrics_have_a_line_per_step_with_every_figure(finished):
    lines = metrics(finished[0])
    assert [line["step"] for line in lines] == list(range(1, 13))
    split = ("compute", *SPANS)
    for line in lines:
        assert sum(line[name] for name in split) == pytest.approx(line["step_seconds"], abs=1e-4)
        assert all(line[name] >= 0 for name in split)
        assert line["host_peak_bytes"] >= line["host_rss_bytes"] > line["pinned_bytes"] > 0


def test_the_plan_shows_where_the_bytes_live_and_the_result_goes_to_stdout(finished):
    _, done = finished
    assert "optimizer tile slots" in done.stderr
    assert "held-out loss" in done.stdout
    assert "Traceback" not in done.stderr


def test_traffic_is_what_the_plan_predicts(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert 0.95 <= summary["ssd_read_bytes_per_step"] / summary["planned_ssd_read_bytes_per_step"] <= 1.05
    assert 0.95 <= summary["ssd_write_bytes_per_step"] / summary["planned_ssd_write_bytes_per_step"] <= 1.05


def test_the_export_is_byte_equal_to_the_store(finished):
    folder, _ = finished
    exported = tensors(folder)
    with TensorStore.open([folder / "memascend.store"], read_only=True, direct_io="optional") as store:
        parameters = [name for name in store.names() if "#" not in name]
        assert sorted(exported) == sorted(parameters)
        for name in parameters:
            assert exported[name].tobytes() == store.get(name).tobytes(), name
            master = store.get(name + "#master")
            assert np.abs(master - exported[name].astype(np.float32)).max() <= np.abs(master).max() / 128


def test_a_finished_run_is_not_run_again_but_shown(finished):
    folder, first = finished
    names = ("metrics.jsonl", "status.json", "summary.json", "config.yaml", "plan.json")
    before = [(folder / name).read_bytes() for name in names]
    again = run(folder, "train.steps=12")
    assert again.returncode == 0
    assert "complete at step 12" in again.stderr
    assert again.stdout == first.stdout != ""
    assert [(folder / name).read_bytes() for name in names] == before


def test_the_plan_command_gives_the_plan_of_the_run(finished):
    folder, _ = finished
    planned = subprocess.run(
        [sys.executable, "-m", "memascend_jax.cli", "plan", "--json", *command(folder, "train.steps=12")[3:]],
        capture_output=True,
        text=True,
    )
    plans = [json.loads(planned.stdout), json.loads((folder / "plan.json").read_text())]
    for plan in plans:
        assert any(consumer["nbytes"] > 0 for consumer in plan["consumers"] if consumer["category"] == "data")
        del plan["budget_host_bytes"]  # What was available at its time.
    # The command tells more, of the disk and of time.
    assert {key: plans[0][key] for key in plans[1]} == plans[1]


def test_a_new_run_overwrites_nothing_in_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    mine = tmp_path / "run" / "metrics.jsonl"
    mine.write_text("mine\n")
    refused = run(tmp_path / "run")
    assert refused.returncode == 2
    assert "metrics.jsonl" in refused.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(finished, tmp_path, number):
    folder = tmp_path / "run"
    with subprocess.Popen(
        command(folder, "train.steps=12"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_step(folder, 3, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 75, errors
    assert "the same command goes on" in errors
    stopped = json.loads((folder / "status.json").read_text())
    assert stopped["state"] == "stopped"
    assert 3 <= stopped["step"] < 12
    done = run(folder, "train.steps=12")
    assert done.returncode == 0, done.stderr
    assert f"going on from step {stopped['step']}" in done.stderr
    assert exact(metrics(folder)) == exact(metrics(finished[0]))
    expected = tensors(finished[0])
    assert all(value.tobytes() == expected[name].tobytes() for name, value in tensors(folder).items())


def test_a_second_interrupt_ends_at_once_and_loses_nothing(tmp_path):
    # A step of many micro-batches: long enough for the second interrupt to come within it.
    slow = ("train.steps=2", "train.gradient_accumulation_steps=12", "run.export=false")
    folder = tmp_path / "run"
    with subprocess.Popen(command(folder, *slow), stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(folder, 1, process)
        process.send_signal(signal.SIGINT)
        errors = ""
        while "SIGINT: stopping" not in errors:
            line = process.stderr.readline()
            assert line, errors
            errors += line
        process.send_signal(signal.SIGINT)
        errors += process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert state_of(folder) == "interrupted"
    done = run(folder, *slow)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr
    assert [line["step"] for line in metrics(folder)] == [1, 2]


@pytest.mark.parametrize("moment", ["importing", "starting", "running", "stopped", "done"])
def test_interrupts_without_end_never_show_a_traceback(tmp_path, moment):
    """From each moment on SIGINT comes every 5 ms until the process is gone."""
    folder = tmp_path / "run"
    with subprocess.Popen(
        command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if moment == "importing":
            wait_until(process, lambda: "jaxlib" in Path(f"/proc/{process.pid}/maps").read_text())
        elif moment == "stopped":
            wait_for_step(folder, 2, process)
            process.send_signal(signal.SIGINT)
        if moment != "importing":
            wait_until(process, lambda: state_of(folder) == moment)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
        _, errors = process.communicate()
    assert process.returncode in {"stopped": (75, 130), "done": (0, 130)}.get(moment, (130,)), errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["memascend_jax.recipes.llama_finetune", "memascend_jax.cli"])
def test_an_interrupt_before_anything_is_loaded_leaves_nothing(tmp_path, module, number):
    arguments = {
        "memascend_jax.cli": ["plan", "--config", "tiny_random"],
        "memascend_jax.recipes.llama_finetune": command(tmp_path / "run")[3:],
    }
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments[module]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # The first library that is large enough to be caught half imported.
        wait_until(process, lambda: "pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    ends = (130, "memascend: interrupted\n")
    if number == signal.SIGTERM and module.endswith("llama_finetune"):
        # A scheduler learns that it may start it again.
        ends = (
            75,
            "memascend: stopped by SIGTERM before the run had begun; the same command begins it, or goes on\n",
        )
    assert (process.returncode, errors) == ends
    assert not (tmp_path / "run").exists()


def test_the_store_of_another_program_is_not_overwritten(tmp_path):
    with TensorStore.create([tmp_path / "theirs"], capacity="4MiB", direct_io="optional") as store:
        store.put("w", np.arange(10))
        store.commit()
    before = (tmp_path / "theirs").read_bytes()
    refused = run(tmp_path / "run", f"offload.store=[{tmp_path}/theirs]")
    assert refused.returncode == 6
    assert "something else" in refused.stderr
    assert (tmp_path / "theirs").read_bytes() == before


def test_a_store_in_a_folder_that_is_not_there_is_refused(tmp_path):
    refused = run(tmp_path / "run", f"offload.store=[{tmp_path}/unmounted/disk/s]")
    assert refused.returncode == 6
    assert "mounted" in refused.stderr
    assert not (tmp_path / "unmounted").exists()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(finished, tmp_path):
    folder = tmp_path / "run"
    for step in (2, 6):
        with subprocess.Popen(
            command(folder, "train.steps=12"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            wait_for_step(folder, step, process)
            process.kill()
        told = read_run(folder)["status"]
        assert told["state"] == "died"
        assert told["message"] == f"there is no process {process.pid} any more"
    done = run(folder, "train.steps=12")
    assert done.returncode == 0, done.stderr
    assert exact(metrics(folder)) == exact(metrics(finished[0]))
    expected = tensors(finished[0])
    assert all(value.tobytes() == expected[name].tobytes() for name, value in tensors(folder).items())


def test_other_settings_do_not_continue_a_run(finished):
    folder, _ = finished
    refused = run(folder, "train.steps=12", "optimizer.learning_rate=3e-3")
    assert refused.returncode == 2
    assert "optimizer.learning_rate" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_run_is_never_overwritten(finished):
    folder, _ = finished
    size, before = (folder / "memascend.store").stat().st_size, (folder / "metrics.jsonl").read_bytes()
    refused = run(folder, "train.steps=12", "run.resume=never")
    assert refused.returncode == 2
    assert "memascend store wipe" in refused.stderr
    assert (folder / "memascend.store").stat().st_size == size
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "status", "words"),
    [
        (["optimizer.lerning_rate=1", "train.steps=x"], 2, ["optimizer.learning_rate", "train.steps"]),
        (["offload.host_memory=100MiB"], 4, ["100.00 MiB", "offload.host_memory"]),
        (["run.resume=required"], 6, ["no store"]),
        (["offload.store=[/proc/nowhere/s]"], 6, ["/proc/nowhere"]),
    ],
)
def test_bad_input_gets_one_clear_message_and_its_status(tmp_path, overrides, status, words):
    refused = run(tmp_path / "run", *overrides)
    assert refused.returncode == status, refused.stderr
    assert all(word in refused.stderr for word in words), refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_model_that_is_not_there_is_named(tmp_path):
    refused = subprocess.run(
        [*PROGRAM, "model.source=nowhere", f"run.dir={tmp_path}/run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 5
    assert "nowhere" in refused.stderr
    assert "Traceback" not in refused.stderr


def wait_until(process, is_so):
    """Returns when ``is_so()``; the process must not have ended before."""
    deadline = time.monotonic() + 200
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_for_step(folder, step, process):
    """Returns when the run in ``folder`` has written the metrics of ``step``."""
    path = folder / "metrics.jsonl"
    wait_until(process, lambda: path.exists() and path.read_bytes().count(b"\n") >= step)


def state_of(folder):
    """Returns the state in ``status.json``, or None before there is one."""
    path = folder / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else None


def test_counted_bytes_are_those_of_the_kernel(tmp_path):
    """The process's own counters against ``/proc/self/io``, on the part that moves data."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pathlib import Path
from streamed_run import streamed_run
def moved():
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])
with streamed_run(Path({str(tmp_path / "run")!r}), "offload.direct_io=required") as run:
    run.train(1)
    counted, kernel = run.session.placement.io_bytes(), moved()
    run.train(3)
    counted = [b - a for a, b in zip(counted, run.session.placement.io_bytes())]
    kernel = [b - a for a, b in zip(kernel, moved())]
    print(*counted, *kernel)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    if "O_DIRECT" in done.stderr:
        pytest.skip("this file system has no O_DIRECT, so the kernel's counters include its cache")
    assert done.returncode == 0, done.stderr
    read, write, kernel_read, kernel_write = map(int, done.stdout.split())
    assert read == pytest.approx(kernel_read, rel=0.02)
    assert write == pytest.approx(kernel_write, rel=0.02)
