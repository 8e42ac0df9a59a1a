# SPDX-License-Identifier: Apache-2.0
"""The part of a path that is there, for checks of places where something is to be made."""

from __future__ import annotations

from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """Returns ``path`` itself, or the nearest of its parents that there is."""
    path = path.absolute()
    while not _exists(path) and path != path.parent:
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Below a folder that this user may not enter; that folder is the one to name.
        return False
