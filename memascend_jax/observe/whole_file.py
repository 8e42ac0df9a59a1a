# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all: a full disk, or a kill, leaves the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object], what: str) -> None:
    """Lets ``write`` make a file beside ``path``, which then takes its place; removed again when that fails.

    Args:
        what: the file in words, for the message: ``cannot write <what>``.

    Raises:
        OSError: it cannot be written, with errno and ``path``.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        write(draft)
        draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"cannot write {what}: {error.strerror}", str(path)) from error
        raise


def write_text_whole(path: Path, text: str, what: str) -> None:
    """Writes ``text`` as UTF-8; see ``write_whole``."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"), what)
