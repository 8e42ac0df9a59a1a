# SPDX-License-Identifier: Apache-2.0
"""What people use instead: one file per tensor, or one file in a format of its own.

All of these go through the page cache. So a write counts with its fsync, and before a read the pages are dropped, or
it would measure memory. Sizes are bytes, tensors are uint8.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[np.uint8]]


class FileContender(Protocol):
    """Writes arrays durably, and reads them back when nothing of them is cached."""

    name: str

    def write(self, arrays: Arrays) -> None: ...
    def read(self, arrays: Arrays) -> object: ...


class NumpyFiles:
    """``tofile`` with fsync and ``fromfile``, one file per tensor."""

    name = "numpy tofile/fromfile"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, arrays: Arrays) -> None:
        for index, array in enumerate(arrays.values()):
            with (self._folder / f"{index}").open("wb") as file:
                array.tofile(file)
                file.flush()
                os.fsync(file.fileno())

    def read(self, arrays: Arrays) -> object:
        return [np.fromfile(self._folder / f"{index}", np.uint8) for index in range(len(arrays))]


class Safetensors:
    """One file with all tensors; every tensor is touched, for loading only maps the file."""

    name = "safetensors"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.safetensors"

    def write(self, arrays: Arrays) -> None:
        from safetensors.numpy import save_file

        save_file(dict(arrays), self._path)
        sync(self._path)

    def read(self, arrays: Arrays) -> object:
        from safetensors.numpy import load_file

        return load_file(self._path)


class TensorstoreZarr:
    """tensorstore's zarr driver without compression, chunks of 4 MiB, all tensors at once."""

    name = "tensorstore zarr"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, arrays: Arrays) -> None:
        # tensorstore syncs each file by itself.
        stores = [(self._open(index, array), array) for index, array in enumerate(arrays.values())]
        for pending in [store.write(array) for store, array in stores]:
            pending.result()

    def read(self, arrays: Arrays) -> object:
        stores = [self._open(index, array) for index, array in enumerate(arrays.values())]
        return [pending.result() for pending in [store.read() for store in stores]]

    def _open(self, index: int, array: npt.NDArray[np.uint8]) -> Any:
        import tensorstore

        return tensorstore.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": str(self._folder / f"{index}")},
                "metadata": {"compressor": None, "chunks": [min(array.nbytes, 4 << 20)]},
            },
            dtype=tensorstore.uint8,
            shape=[array.nbytes],
            create=True,
            open=True,
        ).result()


class TensorstoreFiles:
    """tensorstore's file key-value store, one key per tensor."""

    name = "tensorstore file"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, arrays: Arrays) -> None:
        store = self._open()
        for pending in [store.write(f"{i}", array.tobytes()) for i, array in enumerate(arrays.values())]:
            pending.result()

    def read(self, arrays: Arrays) -> object:
        store = self._open()
        return [pending.result().value for pending in [store.read(f"{i}") for i in range(len(arrays))]]

    def _open(self) -> Any:
        import tensorstore

        return tensorstore.KvStore.open({"driver": "file", "path": f"{self._folder}/"}).result()


_KNOWN: dict[str, tuple[str, Callable[[Path], FileContender]]] = {
    "numpy": ("numpy", NumpyFiles),
    "safetensors": ("safetensors", Safetensors),
    "zarr": ("tensorstore", TensorstoreZarr),
    "file": ("tensorstore", TensorstoreFiles),
}
KINDS = tuple(_KNOWN)


def installed(kind: str) -> bool:
    """Returns whether the package that ``kind`` needs is there."""
    return find_spec(_KNOWN[kind][0]) is not None


def build(kind: str, folder: Path) -> FileContender:
    """Returns the contender ``kind`` over a new ``folder``."""
    folder.mkdir(parents=True)
    return _KNOWN[kind][1](folder)


def drop_from_cache(folder: Path) -> None:
    """Makes the next read of every file under ``folder`` come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def remove(folder: Path) -> None:
    """Removes ``folder`` and what the contender left in it."""
    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes the contents of ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
