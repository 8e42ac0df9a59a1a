# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver for tests without a GPU, built with the C compiler and used in a child process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("cuda_stand_in.c")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the stand-in received; result 0 is success."""

    name: str
    address: int
    nbytes: int
    result: int


@dataclass(frozen=True, slots=True)
class StandIn:
    """A folder with the built ``libcuda.so.1``; ``run`` uses it, ``calls`` tells what was called by then."""

    folder: Path

    def run(self, code: str, refuse: str = "") -> str:
        """Runs Python code against the stand-in and returns what it printed; a failure there is one here."""
        self._log.unlink(missing_ok=True)
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(self.folder),
            "CUDA_STAND_IN_LOG": str(self._log),
            "CUDA_STAND_IN_REFUSE": refuse,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "JAX_PLATFORMS": "cpu",
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def calls(self, *names: str) -> list[Call]:
        """Returns the calls of these names in order; without names all."""
        calls = []
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            name, address, nbytes, result = line.split()
            if not names or name in names:
                calls.append(Call(name, int(address), int(nbytes), int(result)))
        return calls

    @property
    def _log(self) -> Path:
        return self.folder / "calls"


def build_stand_in(folder: Path) -> StandIn:
    """Returns the stand-in, built into ``folder``; skips the test where there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler: cc, gcc and clang are not on the path")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    target = folder / "libcuda.so.1"
    done = subprocess.run(
        [*command, "-o", str(target), str(SOURCE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return StandIn(folder)
