# SPDX-License-Identifier: Apache-2.0
"""What takes long to make is made under a hidden name beside its place and renamed when it is whole."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Returns the hidden name that this process makes ``path`` under."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed left of ``path`` under hidden names: as large as the whole."""
    for partial in path.parent.glob(f"{glob.escape(f'.{path.name}.partial-')}*"):
        if not Path("/proc", partial.name.rpartition("-")[2]).exists():
            remove(partial)


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it; does nothing when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
