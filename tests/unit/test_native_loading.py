# SPDX-License-Identifier: Apache-2.0
"""The compiled core is found in place, or installed behind a source tree that hides it; else a clear refusal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memascend_jax
from memascend_jax._native import _core

_SOURCE = Path(memascend_jax.__file__).parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without a compiled module, and beside it an empty ``site`` folder."""
    package = tmp_path / "clone" / "memascend_jax"
    (package / "_native").mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "_native/__init__.py"):
        shutil.copy(_SOURCE / name, package / name)
    (tmp_path / "site" / "memascend_jax" / "_native").mkdir(parents=True)
    return tmp_path


def _import_core(tree: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.path[:0] = [{str(tree / 'clone')!r}, {str(tree / 'site')!r}]; {before}\n"
        "from memascend_jax._native import _core; print(_core.__file__)"
    )
    # -I and -S: no PYTHONPATH, no current folder, no installed packages: only the two folders count.
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _install(tree: Path) -> Path:
    target = tree / "site" / "memascend_jax" / "_native" / Path(_core.__file__).name
    shutil.copy(_core.__file__, target)
    return target


def test_installed_module_serves_a_source_tree_that_hides_it(tree: Path) -> None:
    installed = _install(tree)
    result = _import_core(tree)
    assert result.stdout.strip() == str(installed), result.stderr


def test_missing_module_names_the_remedy(tree: Path) -> None:
    result = _import_core(tree)
    assert result.returncode != 0
    assert "MachineError: cannot load the compiled core" in result.stderr
    assert "pip install ." in result.stderr


def test_module_of_another_version_is_refused(tree: Path) -> None:
    _install(tree)
    script = tree / "clone" / "memascend_jax" / "_native" / "__init__.py"
    newer = script.read_text().replace(
        f"SOURCE_VERSION = {_core.SOURCE_VERSION}", f"SOURCE_VERSION = {_core.SOURCE_VERSION + 1}"
    )
    script.write_text(newer)
    result = _import_core(tree)
    assert f"needs version {_core.SOURCE_VERSION + 1}" in result.stderr


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.platform = 'darwin'", "runs on Linux only, this is darwin"),
        ("sys.byteorder = 'big'", "64-bit little-endian"),
        ("import platform; platform.machine = lambda: 'riscv64'", "this is riscv64"),
    ],
)
def test_other_platforms_are_refused_with_a_sentence(tree: Path, before: str, message: str) -> None:
    _install(tree)
    assert message in _import_core(tree, before).stderr
