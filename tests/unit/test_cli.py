# SPDX-License-Identifier: Apache-2.0
"""The command lines: what they print, where, with which exit status, and that they leave files alone."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memascend_jax import cli, errors
from memascend_jax.config import Config
from memascend_jax.observe import failure
from memascend_jax.recipes import llama_finetune
from memascend_jax.storage.tensor_store import TensorStore


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    path = tmp_path / "a.store"
    with TensorStore.create([path], capacity="1MiB", direct_io="optional") as store:
        store.put("weight [x]", np.arange(1000, dtype=np.float32))
        store.put("weight [x]#mu", np.zeros(1000, np.float32))
        store.commit(b"state")
    return path


def test_help_of_the_recipe_documents_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        llama_finetune.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for expected in (
        f"train.steps={Config().train.steps}",
        "Optimizer steps of the run",
        "offload.host_memory=null",
        "tiny_random",
    ):
        assert expected in text


@pytest.mark.parametrize("main", [llama_finetune.main, cli.main])
def test_help_names_every_exit_status(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out.partition("exit status:")[2]
    statuses = {kind.exit_code for kind in errors.MemascendError.__subclasses__()}
    assert statuses | {0, 1, failure.INTERRUPTED} == {int(number) for number in re.findall(r"\b\d+\b", text)}


def test_wrong_configuration_ends_the_recipe_with_2_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)
    status = llama_finetune.main(
        [f"run.dir={run_dir}", "--config", "tiny_random", "train.stepz=1", "train.seed=x"]
    )
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean 'train.steps'" in captured.err
    assert "train.seed: expected a whole number" in captured.err
    assert not run_dir.exists()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("arguments", [["--train.steps=3"], ["--conf", "x"]])
def test_unknown_option_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        llama_finetune.main(arguments)
    assert caught.value.code == 2


def test_plan_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "train.seed=1",
        "--config",
        "tiny_random",
        "train.steps=2",
        "--json",
        "train.samples=0",
    ]
    assert cli.main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["schema"] == 1
    assert plan["planned_host_bytes"] > 0
    assert cli.main(["plan", "--config", "tiny_random"]) == 0
    assert "host" in capsys.readouterr().out


def test_plan_that_does_not_fit_ends_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", "tiny_random", "offload.host_memory=1MiB"]) == 4
    assert capsys.readouterr().out == ""


def test_plan_with_a_wrong_key_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", "tiny_random", "--json", "train.stepz=2"]) == 2
    assert "did you mean 'train.steps'" in capsys.readouterr().err


def test_leftover_arguments_are_refused_where_no_key_is_taken() -> None:
    for arguments in (["report", "a", "b=c"], ["plan", "--jsonn"], [], ["store"], ["bench"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


def test_store_is_inspected_and_verified(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "inspect", str(store_path)]) == 0
    text = capsys.readouterr().out
    assert "weight [x]" in text
    assert re.search(r"weight \[x\] +float32 +1000 +3\.91 KiB +1 +mu  3\.91 KiB", text)
    assert cli.main(["store", "inspect", str(store_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], facts["tensors"][0]["name"]) == (1, "weight [x]")
    assert cli.main(["store", "verify", str(store_path)]) == 0
    assert "every checksum matches" in capsys.readouterr().out


def test_damaged_store_fails_verification_with_6(
    store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = store_path.read_bytes()
    pattern = np.arange(500, 510, dtype=np.float32).tobytes()
    assert pattern in data
    store_path.write_bytes(data.replace(pattern, b"\xff" * len(pattern)))
    assert cli.main(["store", "verify", str(store_path), "--json"]) == 6
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert len(faults) == 1
    assert "weight [x]" in faults[0]
    assert cli.main(["store", "verify", str(store_path)]) == 6
    captured = capsys.readouterr()
    assert re.search(r"\b1 fault\b", captured.out)
    assert "checksum" in captured.err


def test_wipe_removes_a_store_and_nothing_else(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert cli.main(["store", "wipe", str(other)]) == 6
    assert other.read_text() == "mine"
    assert cli.main(["store", "wipe", str(store_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wiped"] == [str(store_path)]
    assert not store_path.exists()
    assert cli.main(["store", "inspect", str(store_path)]) == 6


def test_wipe_of_one_member_needs_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    TensorStore.create(paths, capacity="1MiB", direct_io="optional").close()
    assert cli.main(["store", "wipe", paths[0], "--yes"]) == 6
    assert "its store has 2 members" in capsys.readouterr().err
    assert cli.main(["store", "wipe", paths[0], "--incomplete", "--json"]) == 0
    assert cli.main(["store", "wipe", *paths, "--incomplete", "--json"]) == 0
    assert not list(tmp_path.iterdir())


def test_wipe_asks_on_a_terminal(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: "no\n", raising=False)
    assert cli.main(["store", "wipe", str(store_path)]) == 1
    assert store_path.exists()
    assert cli.main(["store", "wipe", str(store_path), "--yes"]) == 0
    assert not store_path.exists()


def test_report_reads_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"step": 7, "loss_first": 4.0, "loss_last": 2.0}')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "4.0000 → 2.0000  (-50.0 %)" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["step"] == 7
    assert cli.main(["report", str(tmp_path / "missing")]) == 5


def test_export_of_a_store_without_a_run_ends_with_6(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(store_path), "--out", str(tmp_path / "out")]) == 6
    assert "not a training run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_store_is_created_with_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    create = ["store", "create", *paths, "--direct-io", "optional"]
    assert cli.main([*create, "--capacity", "6MiB", "--weights", "2,1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], facts["capacity_bytes"], facts["tensors"]) == (1, 6 << 20, [])
    assert [member["weight"] for member in facts["members"]] == [2, 1]
    assert cli.main([*create, "--capacity", "1MiB"]) == 6
    assert "there is one already" in capsys.readouterr().err
    assert cli.main([*create, "--capacity", "1MiB", "--speeds", "1,3", "--overwrite"]) == 0
    assert "block" not in capsys.readouterr().err
    before = sum((tmp_path / name).stat().st_size for name in "ab")
    larger = ["--capacity", "1MiB", "--speeds", "1,3", "--catalog-bytes", "8MiB", "--overwrite"]
    assert cli.main([*create, *larger]) == 0
    after = sum((tmp_path / name).stat().st_size for name in "ab")
    assert 2 * 2 * (7 << 20) < after - before <= 2 * 2 * (8 << 20)
    capsys.readouterr()
    for arguments, status, message in [
        (["--capacity", "1 elephant"], 2, "--capacity: expected a size"),
        (["--catalog-bytes", "1 elephant"], 2, "--catalog-bytes: expected a size"),
        (["--weights", "2,x"], 2, "--weights: expected numbers"),
        ([], 6, "a new store needs a capacity"),
    ]:
        assert cli.main([*create, *arguments]) == status
        assert message in capsys.readouterr().err


def test_inspect_tells_how_long_the_drives_last(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect = ["store", "inspect", str(store_path), "--rated-tbw"]
    assert cli.main([*inspect, "600"]) == 0
    assert re.search(r"KiB +545\.70 TiB +\S+ % +too early to say", capsys.readouterr().out)
    assert cli.main([*inspect, "600", "--json"]) == 0
    (member,) = json.loads(capsys.readouterr().out)["endurance"]
    assert 0 < member["used"] < 1e-6
    assert member["days_left"] is None
    assert cli.main([*inspect, "600,300"]) == 6
    assert "one for each of the 1 members" in capsys.readouterr().err
