# SPDX-License-Identifier: Apache-2.0
"""Questions from docstrings: clean, each answer once, the same on every run, and never by importing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memascend_jax.data.pydocs import first_paragraph, read_pairs
from memascend_jax.errors import DataError

MODULE = '''
"""A module."""
raise RuntimeError("must not be imported")

def opened(path: str, mode: str = "r", *, strict: bool = False) -> int:
    """Open the file at :func:`path` and return a ``handle`` for it

    More text.
    """

def _private():
    """Never asked about by anyone."""

class Box:
    """A box of things."""

    def put(self, item, where=(1, 2)):
        """Put the item into the box."""

    @property
    def size(self):
        """The number of items in the box."""

    def copy(self):
        """Open the file at `path` and return a `handle` for it."""

def short():
    """Short."""
'''


def library(folder: Path, modules: int = 30) -> Path:
    for index in range(modules):
        text = f'def f{index}(a, b=1):\n    """Return the number {index} in words."""\n'
        (folder / f"m{index}.py").write_text(text)
    return folder


def test_pairs_of_a_module(tmp_path: Path) -> None:
    library(tmp_path)
    (tmp_path / "thing.py").write_text(MODULE)
    pairs = {pair.name: pair for pair in read_pairs(tmp_path) if pair.name.startswith("thing.")}
    opened = pairs["thing.opened"]
    assert opened.question == "What does `thing.opened(path, mode='r', *, strict=False)` do?"
    assert opened.answer == "Open the file at `path` and return a `handle` for it."
    assert pairs["thing.Box.put"].question == "What does `thing.Box.put(item, where=(1, 2))` do?"
    assert set(pairs) == {"thing.opened", "thing.Box.put"}, (
        "private, property, copied and short ones are left out"
    )


def test_private_and_test_folders_and_broken_files_are_skipped(tmp_path: Path) -> None:
    library(tmp_path)
    for name in ("test", "_private", "site-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text('def x():\n    """Return what nobody should see here."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "null.py").write_bytes(b"\x00\xff")
    assert len(read_pairs(tmp_path)) == 30


def test_order_depends_on_names_only(tmp_path: Path) -> None:
    assert [pair.name for pair in read_pairs(library(tmp_path))] == [
        pair.name for pair in read_pairs(tmp_path)
    ]
    assert len(read_pairs(tmp_path, most=25)) == 25


def test_stripped_installation_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found 0 documented functions"):
        read_pairs(tmp_path)


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return the sum\n   of all numbers.\n\n   Details.", "Return the sum of all numbers."),
        ("Return one of :class:`~a.B` or ``None``:", "Return one of `a.B` or `None`."),
        ("short", None),
        ("lower case start of a docstring", None),
        (">>> This is code and no sentence.", None),
        ("f(x) -> what it returns, a signature.", None),
        ("A sentence that is far too long. " * 20, None),
        ("Ein Satz mit Umläuten und sonst nichts.", None),
    ],
)
def test_first_paragraph_becomes_a_sentence_or_nothing(docstring: str, expected: str | None) -> None:
    assert first_paragraph(docstring) == expected


def test_installed_library_gives_enough_without_importing_it() -> None:
    code = (
        "import sys; from memascend_jax.data.pydocs import read_pairs; pairs = read_pairs(most=200);"
        "assert len(pairs) == 200 and len({p.answer for p in pairs}) == 200, len(pairs);"
        "assert 'tkinter' not in sys.modules and 'turtle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
