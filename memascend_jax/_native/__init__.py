# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled core.

``from memascend_jax._native import _core`` works in three places: in an installed package, in a
source tree with a module built in place, and in a source tree that hides an installed package
(``pip install . && python -m memascend_jax…`` inside the clone: the current folder comes first on
``sys.path`` and holds no compiled module). In the last case the installed module is used, if it was
built from the same version of the bindings.
"""

from __future__ import annotations

import importlib
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from memascend_jax.errors import MachineError

#: The version of the bindings that this Python code was written for (native/include/memascend/version.hpp).
SOURCE_VERSION = 7

_ARCHITECTURES = ("x86_64", "aarch64")
_REMEDY = "run `pip install .` in the source tree, with the Python that you use now"


def _check_platform() -> None:
    if sys.platform != "linux":
        raise MachineError(f"memascend-jax runs on Linux only, this is {sys.platform}")
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        raise MachineError("memascend-jax needs a 64-bit little-endian processor")
    if platform.machine() not in _ARCHITECTURES:
        raise MachineError(
            f"memascend-jax supports {' and '.join(_ARCHITECTURES)}, this is {platform.machine()}"
        )


def _compiled_here(folder: Path) -> bool:
    return any((folder / f"_core{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def _installed_folders() -> list[Path]:
    """Returns every other ``memascend_jax/_native`` on ``sys.path`` with a compiled module."""
    here = Path(__file__).resolve().parent
    folders = (Path(entry or ".").resolve() / "memascend_jax" / "_native" for entry in sys.path)
    return [folder for folder in folders if folder != here and _compiled_here(folder)]


def _load_core() -> None:
    if not _compiled_here(Path(__file__).resolve().parent):
        __path__.extend(str(folder) for folder in _installed_folders())
    try:
        core = importlib.import_module("memascend_jax._native._core")
    except ImportError as error:
        raise MachineError(f"cannot load the compiled core of memascend-jax ({error}); {_REMEDY}") from error
    if core.SOURCE_VERSION != SOURCE_VERSION:
        raise MachineError(
            f"the compiled core {core.__file__} has version {core.SOURCE_VERSION} of the bindings, "
            f"this Python code needs version {SOURCE_VERSION}; {_REMEDY}"
        )


_check_platform()
_load_core()
