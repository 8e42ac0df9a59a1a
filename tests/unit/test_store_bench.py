# SPDX-License-Identifier: Apache-2.0
"""``memascend store bench`` at toy size: who takes part, on which files, what is told when, and that nothing stays."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memascend_jax import cli


def test_bench_at_toy_size_measures_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["store", "bench", str(tmp_path), "--direct-io", "optional", "--size", "1MiB"]
    arguments = [*bench, "--rounds", "1", "--against", "numpy,safetensors", "--json"]
    assert cli.main(arguments) == 0
    out, progress = capsys.readouterr()
    facts = json.loads(out)
    # Each case's outcome is told when it is there, not at the end.
    assert re.search(
        r"^read, one tensor of 1.00 MiB\n  memascend store: [\d.]+ GB/s ± [\d.]+, .*\n  numpy .* times as fast\n",
        progress,
        re.MULTILINE,
    )
    done = {(series["contender"], series["case"].partition(",")[0]) for series in facts["series"]}
    assert {("memascend store", kind) for kind in ("write", "read", "mixed", "durable write")} <= done
    assert {("safetensors", "read"), ("numpy tofile/fromfile", "durable write")} <= done
    assert all(series["median"] > 0 for series in facts["series"])
    assert all(ratio["ratio"] > 0 for ratio in facts["ratios"])
    assert facts["machine"]["cores"] > 0
    assert list(tmp_path.iterdir()) == []
    assert ("memascend store, no checksums", "write") in done
    assert cli.main([*bench, "--against", "wishes"]) == 2
    assert cli.main([*bench, "--kinds", "dreaming"]) == 2
    assert "durable write, rows with 1,048,576 bytes, against fio" in capsys.readouterr().err
    (tmp_path / "memascend-bench.store").write_text("mine")
    assert cli.main(arguments) == 6
    assert "the file exists" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_bench_measures_fio_on_the_members_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    real = subprocess.run

    def recorded(command: list[str], **arguments: Any) -> Any:
        commands.append(command)
        return real(command, **arguments)

    monkeypatch.setattr(subprocess, "run", recorded)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    bench = ["store", "bench", *map(str, folders), "--size", "8MiB", "--rounds", "1", "--kinds", "read,rows"]
    assert cli.main([*bench, "--direct-io", "optional", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {s["case"].partition(" ")[0] for s in facts["series"] if s["contender"] == "fio io_uring"} == {
        "read,",
        "4,096",
    }
    runs = [command for command in commands if command[:2] == ["fio", "--name=roof"]]
    names = ":".join(str(folder / "memascend-bench.store") for folder in folders)
    assert runs
    assert all(f"--filename={names}" in command for command in runs)
    # Behind the superblock and the catalogs.
    assert all(
        int(argument[9:]) >= 1 << 20 for run in runs for argument in run if argument[:9] == "--offset="
    )
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
