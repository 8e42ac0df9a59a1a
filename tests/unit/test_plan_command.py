# SPDX-License-Identifier: Apache-2.0
"""``memascend plan`` answers before anything is bought, fetched or loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memascend_jax import cli
from memascend_jax.recipes.machine_speed import measure_update_rate
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.units import parse_quantity


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_a_model_by_name_is_planned_for_a_machine_that_has_the_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = plan(
        capsys,
        "--model",
        "llama3-70b",
        "offload.host_memory=500GiB",
        "--read-bandwidth",
        "7GB/s",
        "--write-bandwidth",
        "5GB/s",
        "--flops",
        "150e12",
        "--accelerator",
    )
    assert facts["parameters"] == 70_553_706_496
    assert facts["planned_host_bytes"] <= facts["budget_host_bytes"] == 500 << 30
    assert sum(consumer["nbytes"] for consumer in facts["consumers"]) == facts["planned_host_bytes"]
    assert any("less than the budget" in note for note in facts["notes"])
    assert all(consumer["category"] == "device" for consumer in facts["device_consumers"])
    assert facts["speeds"]["read_bytes_per_s"] == 7e9
    forward, backward = facts["phases"]
    assert facts["step_seconds"] == pytest.approx(forward["seconds"] + backward["seconds"])
    assert forward["bound_by"] == "SSD"
    assert facts["bottleneck"].startswith("SSD")
    written = sum(phase["write_bytes"] for phase in facts["traffic"])
    assert written == facts["ssd_write_bytes_per_step"]
    assert facts["terabytes_written_per_1000_steps"] == pytest.approx(written * 1000 / 1e12)
    needed = facts["disk_bytes_by_durability"]
    assert needed["step"] == facts["disk_bytes"]
    # 14 bytes each in two places or one, and two for the gradients.
    assert needed["step"] == pytest.approx(70_553_706_496 * 30, rel=0.001)
    assert needed["checkpoint"] == pytest.approx(70_553_706_496 * 16, rel=0.001)


def test_the_device_of_a_cpu_is_in_the_hosts_budget(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "smollm2-135m", "offload.host_memory=1GiB")
    host, apart = plan(capsys, *arguments), plan(capsys, *arguments, "--accelerator")
    assert {consumer["category"] for consumer in host["consumers"]} >= {"device", "arena", "runtime"}
    assert host["device_consumers"] == []
    assert {consumer["category"] for consumer in apart["consumers"]} == {"data", "arena", "runtime"}
    # What the device does not take is spent on less traffic.
    assert apart["ssd_read_bytes_per_step"] < host["ssd_read_bytes_per_step"]


@pytest.mark.parametrize("how", ["option", "word", "folder"])
def test_a_config_json_is_planned_whatever_its_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1024}
    path.write_text(json.dumps({"model_type": "stablelm", "num_attention_heads": 4, **sizes}))
    given = {"option": ("--model", str(path)), "word": (str(path),), "folder": ("--model", str(tmp_path))}
    facts = plan(capsys, *given[how])
    assert facts["parameters"] == 2 * 1024 * 256 + 3 * (4 * 256 * 256 + 3 * 512 * 256 + 2 * 256) + 256
    assert any("training does not know this model yet" in note for note in facts["notes"])
    assert facts["phases"] == []
    assert facts["step_seconds"] is None


def test_a_recipe_can_be_named_without_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny_random", "train.steps=3", "offload.direct_io=optional"]) == 0
    out = capsys.readouterr().out
    assert "disk space" in out
    assert "free" in out
    assert "give --read-bandwidth and --write-bandwidth, or --measure" in out


def test_the_printed_plan_has_time_and_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = (
        "--read-bandwidth",
        "3GB/s",
        "--write-bandwidth",
        "2e9",
        "--flops",
        "160G",
        "--update-rate",
        "1e9",
    )
    assert cli.main(["plan", "--model", "qwen2.5-0.5b", "offload.host_memory=2GiB", *speeds]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a step takes" in out
    assert "3.00 GB/s read, 2.00 GB/s written, 0.16 TFLOP/s, 1.00 G parameters/s updated" in out
    assert "it waits for" in out


def test_a_budget_too_small_is_refused_with_the_minimum_and_status_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", "--model", "smollm2-135m", "data.seq_len=8192", "train.micro_batch_size=4"]
    assert cli.main([*arguments, "offload.host_memory=900MiB"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "offload.host_memory=" in captured.err
    assert "data.seq_len=" in captured.err


def test_a_budget_that_this_machine_does_not_have_is_no_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"run.dir={tmp_path}", "offload.direct_io=optional", "train.micro_batch_size=10000000")
    assert cli.main(["plan", "tiny_random", *more]) == 4
    advice = capsys.readouterr().err.partition("What would help: ")[2]
    assert "offload.host_memory=" not in advice
    assert advice.startswith("train.micro_batch_size=")
    assert "; a machine with " in advice
    # What there is may be given.
    assert cli.main(["plan", "tiny_random", *more[:2], "offload.host_memory=1MiB"]) == 4
    assert "What would help: offload.host_memory=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "lama3-8b"], 5, "did you mean llama3-8b"),
        (["--model", "llama3-8b", "x.json"], 2, "one model at a time"),
        (["--flops", "1e12"], 2, "needs --read-bandwidth and --write-bandwidth"),
        (["--read-bandwidth", "fast", "--write-bandwidth", "1"], 2, "--read-bandwidth: expected a positive"),
        (["no_such_recipe"], 2, "does not exist"),
    ],
)
def test_wrong_questions_are_refused(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == status
    assert message in capsys.readouterr().err


def test_a_damaged_config_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for text, message in (("{", "Expecting property name"), ("[]", "expected a JSON object")):
        path.write_text(text)
        assert cli.main(["plan", str(path)]) == 5
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "status", "message"),
    [
        ("offload.store=/dev/null", 6, "neither a regular file nor a block device"),
        ("offload.store=/proc", 6, "not on a disk"),
        ("offload.store=/nonexistent/x", 6, "'/nonexistent' does not exist"),
        ("offload.store=/etc/passwd", 6, "it holds data of an unknown kind"),
        ("run.dir=/etc/passwd/run", 2, "'/etc/passwd' is not a folder"),
        ("checkpoint.dir=/etc/passwd", 2, "'/etc/passwd' is not a folder"),
    ],
)
def test_places_that_the_run_would_refuse_are_refused_with_its_status(
    tmp_path: Path, setting: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"run.dir={tmp_path / 'run'}", "checkpoint.every=1", "offload.direct_io=optional", setting)
    assert cli.main(["plan", "tiny_random", *more]) == status
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    # A model on another machine is not asked where its store goes on this one.
    assert cli.main(["plan", "--model", "smollm2-135m", *more]) == 0


def test_a_store_that_a_run_is_using_can_be_planned_for(tmp_path: Path) -> None:
    more = (f"offload.store={tmp_path / 's'}", f"run.dir={tmp_path / 'run'}", "offload.direct_io=optional")
    with TensorStore.create(tmp_path / "s", capacity="1MiB", direct_io="optional"):
        assert cli.main(["plan", "tiny_random", *more]) == 0


def test_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--models"]) == 0
    assert "llama3.1-8b" in capsys.readouterr().out.split()


def test_measuring_leaves_nothing_and_gives_figures_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "deep" / "store"
    arguments = (f"offload.store=[{store}]", "offload.direct_io=optional", "--model", "smollm2-135m")
    facts = plan(capsys, *arguments, "--measure", "--flops", "1e11")
    assert 1e6 < facts["speeds"]["read_bytes_per_s"] < 1e12
    assert 1e6 < facts["speeds"]["write_bytes_per_s"] < 1e12
    assert 1e7 < facts["speeds"]["update_rate"] < 1e11
    assert list(tmp_path.iterdir()) == []


def test_the_update_rate_is_of_memory_and_not_of_a_cache() -> None:
    assert 1e7 < measure_update_rate() < 1e11


def test_planning_loads_no_jax() -> None:
    code = (
        "import sys; from memascend_jax import cli; "
        "cli.main(['plan', '--model', 'llama3-8b']); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7GB/s", 7e9),
        ("2 GiB/s", 2.0 * (1 << 30)),
        ("150e12", 150e12),
        ("150T", 150e12),
        ("80 GFLOPS", 80e9),
        ("0.5PFLOP/s", 5e14),
        ("1e9/s", 1e9),
        ("3000MB/s", 3e9),
    ],
)
def test_quantities_are_read_as_people_write_them(text: str, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "7 GQ/s", "1.2.3", "1e", "GB/s", "."])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        parse_quantity(text)
