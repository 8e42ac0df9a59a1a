# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from the docstrings of the installed Python standard library.

The sources are parsed, never imported: importing runs code. The order is fixed by the names alone, so the same
Python always gives the same examples.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memascend_jax.data.messages import Message
from memascend_jax.data.records import Example
from memascend_jax.data.source import Block, Fault
from memascend_jax.errors import DataError

#: Enough for hundreds of steps; parsing every module would take more than twice the time.
MOST_PAIRS = 2000
_FEWEST_PAIRS = 20
_LARGEST_FILE_BYTES = 200_000
_ANSWER_CHARACTERS = (20, 240)
_QUESTION_CHARACTERS = 110
_NOT_PROSE = (">>>", " -> ", ": -", "Returns:", "Args:", " - ")
_SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "distutils",
        "ensurepip",
        "turtledemo",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "lib-dynload",
    }
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A function's qualified name, a question about it, and the first paragraph of its docstring."""

    name: str
    question: str
    answer: str


def read_pairs(stdlib: Path | None = None, most: int = MOST_PAIRS) -> list[Pair]:
    """Returns up to ``most`` pairs, no two with the same answer, in an order that only the names decide.

    Raises:
        DataError: the standard library has no sources here (a stripped or zipped installation).
    """
    folder = stdlib or Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[str, Pair] = {}
    for path in _modules(folder):
        for pair in _pairs_of(path, folder):
            # posixpath and ntpath, say, share their docstrings: a copy in both splits would leak answers.
            pairs.setdefault(pair.answer, pair)
        if len(pairs) >= most:
            break
    if len(pairs) < _FEWEST_PAIRS:
        raise DataError(
            f"cannot make data from the Python standard library in {str(folder)!r}: found {len(pairs)} documented"
            f" functions, expected at least {_FEWEST_PAIRS}; install the full standard library (on Debian and"
            " Ubuntu: apt install python3) or set data.source to a JSONL file"
        )
    return sorted(list(pairs.values())[:most], key=lambda pair: name_hash(pair.name))


class Pydocs:
    """The pairs as a source of one block."""

    name, form = "pydocs", "docstrings"

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        # A block of unknown text; there is no file that could be too large.
        return np.ones(1, np.int64)

    def load(self, block: int) -> Block:
        """Returns all of them."""
        return Block(b"", self._items)

    def fingerprint(self) -> str:
        """Returns a digest of all of them."""
        digest = hashlib.sha256()
        for pair in read_pairs():
            digest.update(f"{pair.name}\0{pair.question}\0{pair.answer}\0".encode())
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Returns: they were read at once."""

    def close(self) -> None:
        """Does nothing."""

    @staticmethod
    def _items(kind: str) -> Iterator[Example | Fault]:
        for pair in read_pairs():
            asked: Message = {"role": "user", "content": pair.question}
            answered: Message = {"role": "assistant", "content": pair.answer}
            yield Example(pair.name, messages=[asked, answered], kind="messages")


def name_hash(name: str) -> bytes:
    """Returns the bytes that decide the place of ``name`` in the order and in the split."""
    return hashlib.sha256(name.encode()).digest()[:8]


def _modules(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith("_") or part in _SKIPPED_FOLDERS for part in parts[:-1])
        if not hidden and (not parts[-1].startswith("_") or parts[-1] == "__init__.py"):
            found.append(path)
    return sorted(found, key=lambda path: name_hash(str(path.relative_to(folder))))


def _pairs_of(path: Path, folder: Path) -> Iterator[Pair]:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # One unreadable file of the installation is no reason to refuse the rest.
    module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    yield from _documented(tree.body, module, in_class=False)


def _documented(body: list[ast.stmt], prefix: str, in_class: bool) -> Iterator[Pair]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _documented(node.body, f"{prefix}.{node.name}", in_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_called(node):
            docstring = ast.get_docstring(node, clean=False)
            answer = first_paragraph(docstring) if docstring else None
            name = f"{prefix}.{node.name}"
            call = f"{name}({_signature(node.args, in_class)})"
            question = f"What does `{call if len(call) <= _QUESTION_CHARACTERS else name + '(…)'}` do?"
            if answer:
                yield Pair(name, question, answer)


def _is_called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether users call it: a public function, and not a property in a function's clothes."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return not node.name.startswith("_") and not decorators & {"property", "setter", "abstractproperty"}


def _signature(arguments: ast.arguments, in_class: bool) -> str:
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    names = [part.strip() for part in ast.unparse(arguments).split(",")]
    if in_class and names and names[0] in ("self", "cls"):
        names = names[1:]
    return ", ".join(names)


def first_paragraph(docstring: str) -> str | None:
    """Returns the first paragraph as one clean sentence or more, or None when it is none.

    References (``:func:`open```) and double backquotes become plain code quotes.
    """
    paragraph = inspect.cleandoc(docstring).split("\n\n")[0]
    text = re.sub(r":[a-z:]+:`~?([^`]+)`", r"`\1`", " ".join(paragraph.split())).replace("``", "`")
    shortest, longest = _ANSWER_CHARACTERS
    is_prose = text[:1].isupper() and text.isascii() and not any(mark in text for mark in _NOT_PROSE)
    if not is_prose or not shortest <= len(text) <= longest:
        return None
    return text if text.endswith((".", "!", "?")) else text.rstrip(":;,") + "."
